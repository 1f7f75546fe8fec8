"""The optimizer, its schedule, and the global gradient norm."""
