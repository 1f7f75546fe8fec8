"""Commands around training; each runs as `python tools/NAME.py` from the repository's root."""
