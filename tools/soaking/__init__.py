"""The soak test: planned faults, the ranks that suffer them, and what is found afterwards."""
