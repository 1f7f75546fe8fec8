"""Values of command-line arguments that the checkpoint commands share."""

import argparse


def positive(text: str) -> int:
    """Parse a whole number from 1 up.

    Args:
        text: The number.

    Raises:
        argparse.ArgumentTypeError: It is none.
    """
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 up")
    return int(text)
