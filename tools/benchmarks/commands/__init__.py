"""The subcommands of `tools/benchmark.py`: each module adds its arguments and turns them into a run."""
