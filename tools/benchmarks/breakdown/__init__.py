"""Where the time of our training step goes, by part: ranges put around it from outside, a trace, and its reading."""
