"""The layouts to check, as text and as degrees."""

from dataclasses import asdict, dataclass, fields

from moe_framework.errors import ConfigError


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism.

    Attributes:
        dp: `parallel.dp`, replicas included.
        ep: `parallel.ep`.
        tp: `parallel.tp`.
        dp_replicate: `parallel.dp_replicate`.
        expert_tp: `parallel.expert_tp`.
    """

    dp: int = 1
    ep: int = 1
    tp: int = 1
    dp_replicate: int = 1
    expert_tp: int = 1

    def __str__(self) -> str:
        always = ("dp", "ep", "tp")
        return ",".join(f"{axis}={degree}" for axis, degree in asdict(self).items() if axis in always or degree != 1)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.dp * self.ep * self.tp

    @property
    def num_data_ranks(self) -> int:
        """Number of ranks with different sequences."""
        return self.dp * self.ep

    @property
    def degrees(self) -> dict[str, int]:
        """The degrees by axis, as `ParallelConfig` and `build_mesh` take them."""
        return asdict(self)


AXES = tuple(field.name for field in fields(Layout))


def parse_layouts(text: str) -> list[Layout]:
    """Read layouts such as `dp=1,ep=2,tp=1;dp=2,ep=2`; an axis that is not given has degree 1.

    Args:
        text: Layouts separated by semicolons, axes by commas.

    Returns:
        The layouts, in order, each once.

    Raises:
        ConfigError: Unknown or repeated axes, or degrees that are no positive integers; all at once.
    """
    violations: list[str] = []
    layouts = [_parse(part.strip(), violations) for part in text.split(";") if part.strip()]
    if not layouts:
        violations.append(f"--layouts={text}: no layout. Give one, such as --layouts 'dp=1,ep=2,tp=1'.")
    if violations:
        raise ConfigError(violations)
    return list(dict.fromkeys(layouts))


def _parse(text: str, violations: list[str]) -> Layout:
    degrees: dict[str, int] = {}
    for item in text.split(","):
        axis, _, value = (part.strip() for part in item.partition("="))
        if axis not in AXES:
            violations.append(f"--layouts={text}: {axis or repr(item)} is no axis. Use {', '.join(AXES)}.")
        elif axis in degrees:
            violations.append(f"--layouts={text}: {axis} is given twice. Remove one of the two.")
        elif not value.isdecimal() or int(value) < 1:
            violations.append(f"--layouts={text}: {axis}={value} must be at least 1. Write {axis}=1 or more.")
        else:
            degrees[axis] = int(value)
    return Layout(**degrees)
