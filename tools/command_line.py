"""What the commands share: a type of arguments, how an error of the user is shown, and Ctrl-C. Free of torch."""

import argparse
import sys
from collections.abc import Callable

from moe_framework.errors import ExitCode, MoeFrameworkError

INTERRUPTED_EXIT_CODE = 130


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


def exit_code_of(action: Callable[[], None]) -> int:
    """Do the work of a command that leaves nothing behind when it is interrupted.

    Args:
        action: The work.

    Returns:
        The exit code: 0, 2 for an error that the user can correct, which is shown, 130 after Ctrl-C.
    """
    try:
        action()
    except MoeFrameworkError as error:
        return show_error(error)
    except KeyboardInterrupt:
        print("Interrupted: nothing was left behind.", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    return 0
