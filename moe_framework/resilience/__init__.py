"""What keeps a run going: signals, heartbeats, restarts and hang reports."""
