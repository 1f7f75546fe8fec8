"""Number formats: what runs in which."""
