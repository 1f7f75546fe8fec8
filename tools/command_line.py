"""What the commands share: a type of arguments, and how an error of the user is shown. Free of torch."""

import argparse
import sys

from moe_framework.errors import ExitCode, MoeFrameworkError


def positive(text: str) -> int:
    """Parse an integer of at least 1.

    Raises:
        ArgumentTypeError: It is none.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no integer of at least 1")
    return int(text)


def show_error(error: MoeFrameworkError) -> int:
    """Print an error to standard error, each of its lines with its type.

    Returns:
        The exit code of an error that the user can correct.
    """
    for line in str(error).splitlines():
        print(f"{type(error).__name__}: {line}", file=sys.stderr)
    return ExitCode.USER_ERROR
