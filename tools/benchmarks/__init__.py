"""The measurements behind `tools/benchmark.py`, and what they share: timing, progress, report, chart."""
