"""The errors that a user can cause, each with a message that says what to change.

A message reads `<key>=<value>`, the rule that was broken, and the remedy. These are printed without a
traceback and end the process with exit code 2. `assert` is for the framework's own bugs.
"""


class MoeFrameworkError(Exception):
    """Base of every error that a user's input can cause."""


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
