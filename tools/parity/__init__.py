"""Comparison of any parallel layout with one rank; `tools/check_parity.py` is the command."""
