"""The errors that a user can cause, each with a message that says what to change.

A message reads `<key>=<value>`, the rule that was broken, and the remedy. These are printed without a
traceback and end the process with exit code 2. `assert` is for the framework's own bugs.
"""

from enum import IntEnum


class ExitCode(IntEnum):
    """How a training process ended, for its launcher; docs/operations.md says what each does with it.

    Attributes:
        DONE: All steps are done and saved.
        FAILED: An unexpected error or a lost rank; starting again continues from the last published step.
        USER_ERROR: Something that starting again does not change.
        STOPPED: Told to stop, and saved before it did; to be started again, where requeued.
        HUNG: Without progress for `resilience.hang_timeout_s`; the hang report says where.
    """

    DONE = 0
    FAILED = 1
    USER_ERROR = 2
    STOPPED = 75  # EX_TEMPFAIL of sysexits.h: try again later
    HUNG = 76


class MoeFrameworkError(Exception):
    """Base of every error that a user's input can cause.

    Attributes:
        said_elsewhere: Whether another rank ends with the same error and prints it, so that this one need not.
    """

    said_elsewhere: bool = False


class ConfigError(MoeFrameworkError):
    """The configuration breaks a rule; the message lists every violation, one a line.

    Args:
        violations: The broken rules, each a complete sentence with its remedy.
    """

    def __init__(self, violations: list[str] | str):
        self.violations = [violations] if isinstance(violations, str) else list(violations)
        super().__init__("\n".join(self.violations))


class DataError(MoeFrameworkError):
    """A data file is missing, empty, malformed, or ended early."""


class CheckpointError(MoeFrameworkError):
    """A checkpoint is missing, damaged, unsafe to read, or of another model."""


class DependencyError(MoeFrameworkError):
    """An optional package is needed and cannot be imported."""


class TrainingError(MoeFrameworkError):
    """Training cannot go on, such as after too many non-finite steps."""


class RankError(MoeFrameworkError):
    """Another rank failed; the message carries that rank's number and error."""
