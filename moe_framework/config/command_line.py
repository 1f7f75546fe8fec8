"""The command line: Hydra's syntax, the few flags that we keep, and the help text."""

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from moe_framework.config.keys import schema_keys, schema_sections
from moe_framework.config.structure import show
from moe_framework.errors import ConfigError

_VALUE_FLAGS = {
    "--config-name": "--config-name",
    "-cn": "--config-name",
    "--config-dir": "--config-dir",
    "-cd": "--config-dir",
    "--cfg": "--cfg",
    "-c": "--cfg",
}
_HELP_FLAGS = ("--help", "-h")

# Hydra's other flags, and what to do instead.
_REFUSED = {
    ("--multirun", "-m"): "Start one run per value.",
    ("--config-path", "-cp"): "Use --config-dir DIR.",
    ("--resolve",): "Leave it out: --cfg job is always resolved.",
    ("--run", "-r"): "Leave it out: running is what happens.",
    ("--package", "-p"): "Leave it out: --cfg job prints the whole configuration.",
    ("--hydra-help",): "Use --help.",
    ("--version",): "Use pip show moe_framework.",
    ("--info", "-i"): "Use --cfg job.",
    ("--shell-completion", "-sc"): "Leave it out.",
    ("--experimental-rerun",): "Use the config.yaml that the run saved, with --config-dir and --config-name.",
}

_USAGE = """\
Usage:
  torchrun --nproc_per_node=N train_fsdp2_ep.py --config-name NAME [KEY=VALUE ...]
  python train_fsdp2_ep.py --config-name NAME [KEY=VALUE ...]        (one rank)

  -cn, --config-name NAME   the configuration, a YAML file without its ending
  -cd, --config-dir DIR     a folder of your own beside configs/, looked up first for NAME
  -c,  --cfg job            print the resolved configuration and stop
  -h,  --help               print this text and stop
  KEY=VALUE                 beats the YAML, which beats the default (Hydra's override syntax)
"""


@dataclass(frozen=True)
class CommandLine:
    """What the user asked for.

    Attributes:
        config_name: Name of the YAML file without its ending, or None when it was not given.
        config_dir: Folder that is searched besides the project's own, or None.
        overrides: The `key=value` arguments, in order.
        show: `cfg` to print the configuration, `help` to print the help, None to run.
    """

    config_name: str | None
    config_dir: str | None
    overrides: tuple[str, ...]
    show: Literal["cfg", "help"] | None


def parse_command_line(argv: Iterable[str]) -> CommandLine:
    """Read the arguments after the program's name.

    Raises:
        ConfigError: Unknown or unsupported flags, or a flag without its value; all at once.
    """
    given: dict[str, str] = {}
    overrides: list[str] = []
    violations: list[str] = []
    wants_help = False
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        flag, has_value, value = argument.partition("=")
        if not argument.startswith("-"):
            overrides.append(argument)
        elif argument in _HELP_FLAGS:
            wants_help = True
        elif flag not in _VALUE_FLAGS:
            violations.append(_refusal(flag))
        elif not has_value and (not rest or rest[0].startswith("-")):
            violations.append(f"{flag} needs a value, as in {flag} {_example(flag)}.")
        else:
            given[_VALUE_FLAGS[flag]] = value if has_value else rest.pop(0)
    if given.get("--cfg", "job") != "job":
        violations.append(f"--cfg={given['--cfg']} must be job: there is no other configuration to print.")
    if violations and not wants_help:
        raise ConfigError(violations)
    shown = "help" if wants_help else "cfg" if "--cfg" in given else None
    return CommandLine(given.get("--config-name"), given.get("--config-dir"), tuple(overrides), shown)


def help_text(config_names: Iterable[str], groups: dict[str, list[str]]) -> str:
    """Return the usage, the configurations there are, and every key with default and meaning.

    Args:
        config_names: Names that `--config-name` takes.
        groups: Choices of each configuration group.
    """
    lines = [_USAGE, "Configurations: " + (", ".join(config_names) or "none")]
    lines += [f"Group {group}=NAME: {', '.join(names)}" for group, names in groups.items()]
    lines += ["", "Keys and their defaults:"]
    section = None
    for path, key in schema_keys().items():
        head = path.rpartition(".")[0]
        if head != section:
            section = head
            lines += ["", _first_line(schema_sections()[head])] if head else []
        lines += [f"  {path}={show(key.default)}", f"      {key.meaning}"]
    return "\n".join(lines)


def _first_line(cls: Any) -> str:
    return (cls.__doc__ or cls.__name__).splitlines()[0]


def _example(flag: str) -> str:
    return {"--config-name": "L0_sanity", "--cfg": "job"}.get(_VALUE_FLAGS[flag], str(Path("path", "to", "configs")))


def _refusal(flag: str) -> str:
    for names, remedy in _REFUSED.items():
        if flag in names:
            return f"{flag}: this flag of Hydra is not supported here. {remedy}"
    long_flags = [name for name in (*_VALUE_FLAGS, *_HELP_FLAGS) if name.startswith("--")]
    near = difflib.get_close_matches(flag, long_flags, n=1)
    return f"{flag}: unknown flag. " + (f"Did you mean {near[0]}?" if near else f"Use {', '.join(long_flags)}.")
