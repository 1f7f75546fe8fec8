"""The parts of tools/evaluate.py."""
