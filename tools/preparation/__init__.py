"""Parts of the command that turns text into token files."""
