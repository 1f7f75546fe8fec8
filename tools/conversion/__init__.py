"""Parts of the checkpoint commands."""
