"""The benchmark `scaling`: one training step at several numbers of ranks."""
