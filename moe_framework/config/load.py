"""Compose YAML and command line with Hydra: the command line beats the YAML, the YAML beats the dataclasses.

Hydra composes plain mappings, without a structured schema, so that every violation can be reported at once
(`structure.py`) and `Literal` fields work. Only its compose API is used: it writes nothing to disk.
"""

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from moe_framework.config.command_line import CommandLine, help_text, parse_command_line
from moe_framework.config.home import expand_home, quote_home
from moe_framework.config.keys import schema_keys, schema_sections, unknown_key
from moe_framework.config.schema import Config
from moe_framework.config.structure import MISSING, accepts_text, build_config
from moe_framework.errors import ConfigError

__all__ = ["CommandLine", "help_for", "load_config", "parse_command_line", "to_dict", "to_yaml"]

# Hydra's version whose behaviour the YAML files rely on.
_VERSION_BASE = "1.3"

# What Hydra and OmegaConf raise for files that a user wrote: besides their own errors, plain ones for a root
# that is no mapping, for text that is not UTF-8, and for a malformed defaults list.
_FILE_ERRORS = (HydraException, OmegaConfBaseException, OSError, ValueError, TypeError, AttributeError)


def load_config(
    config_name: str | None, overrides: Sequence[str], config_dir: str | Path, extra_dir: str | Path | None = None
) -> Config:
    """Compose a configuration and check its keys and types; `validate` checks the rules between keys.

    A leading `~` in a path is the home folder (`home.py`).

    Args:
        config_name: A YAML file of the folders below, without its ending.
        overrides: `key=value` in Hydra's override syntax; the last of several wins.
        config_dir: The folder of configurations.
        extra_dir: A second folder, which comes first if it has `config_name`. Files and groups that the
            configuration names may be in either.

    Raises:
        ConfigError: Every unknown key, wrong type, missing value or unreadable file, all at once.
    """
    violations: list[str] = []
    folders = _folders(config_dir, extra_dir)
    arguments = _for_hydra(overrides, folders, violations)
    name = _existing_name(config_name, folders, violations)
    values = _compose(name, arguments, folders, violations) if name else None
    config = expand_home(build_config(values or {}, violations), violations)
    if violations:
        raise ConfigError(violations)
    return config


def to_dict(config: Config) -> dict[str, Any]:
    """Return the configuration as nested plain values, which JSON and YAML can hold."""
    return asdict(config)


def to_yaml(config: Config) -> str:
    """Return the configuration as YAML with every key; loading it gives the same configuration."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


def help_for(config_dir: str | Path, extra_dir: str | Path | None = None) -> str:
    """Return the help text with the configurations and groups of the folders."""
    folders = _folders(config_dir, extra_dir)
    groups = {path.name for folder in folders for path in folder.iterdir() if path.is_dir()}
    return help_text(_names(folders), {group: _names(folders, group) for group in sorted(groups)})


def _folders(config_dir: str | Path, extra_dir: str | Path | None) -> list[Path]:
    folders = [Path(folder).expanduser().resolve() for folder in (extra_dir, config_dir) if folder is not None]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"--config-dir={folder}: no such folder. Give the folder that holds the YAML files.")
    return folders


def _names(folders: Iterable[Path], group: str = "") -> list[str]:
    return sorted({path.stem for folder in folders for path in (folder / group).glob("*.yaml")})


def _existing_name(config_name: str | None, folders: list[Path], violations: list[str]) -> str | None:
    available = ", ".join(_names(folders)) or "none"
    if not config_name:
        violations.append(f"--config-name is missing. Choose one of: {available}.")
        return None
    name = config_name.removesuffix(".yaml")
    if "/" in name:
        folder, _, base = name.rpartition("/")
        violations.append(
            f"--config-name={config_name} is a path. Write --config-dir {folder or '/'} --config-name {base}."
        )
        return None
    if any((folder / f"{name}.yaml").is_file() for folder in folders):
        return name
    near = difflib.get_close_matches(name, _names(folders), n=1)
    guess = f"Did you mean {near[0]}? " if near else ""
    places = " or ".join(str(folder) for folder in folders)
    violations.append(f"--config-name={config_name}: no such file in {places}. {guess}Available: {available}.")
    return None


def _for_hydra(overrides: Iterable[str], folders: list[Path], violations: list[str]) -> list[str]:
    parser = OverridesParser.create()
    arguments = []
    for text in map(quote_home, overrides):
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            violations.append(_unparsed(text, error))
            continue
        problem = _problem(override, text, folders)
        if problem:
            violations.append(problem)
        else:
            arguments.append(_argument(override, text, folders))
    return arguments


def _unparsed(text: str, error: HydraException) -> str:
    if "=" not in text:
        return f"{text}: not an override. Write KEY=VALUE, such as train.max_steps=100."
    key, _, value = text.partition("=")
    reason = _one_line(error)
    return f"{text}: not in Hydra's override syntax ({reason}). If the value is text, quote it: '{key}=\"{value}\"'."


def _problem(override: Override, text: str, folders: list[Path]) -> str | None:
    """Return what is wrong with an override that parsed, or None."""
    key = override.key_or_group
    assignment = text.lstrip("+")
    if override.is_hydra_override() or key == "hydra":
        return f"{assignment}: Hydra only composes the configuration here. Use run.dir and run.name for the output."
    if override.is_sweep_override():
        return (
            f"{assignment}: several values are a sweep, which is not supported. Start one run per value, or quote it."
        )
    if _is_group(override, folders):
        choices = _names(folders, key)
        if override.is_delete() or override.value() in (None, *choices):
            return None
        return f"{assignment} must be one of {', '.join(choices)}."
    if key not in schema_keys() and key not in schema_sections():
        return unknown_key(key, assignment)
    return None


def _is_group(override: Override, folders: list[Path]) -> bool:
    # Hydra's own rule: a mapping is a value even where a group of the name exists.
    return not isinstance(override.value(), dict) and any(
        (folder / override.key_or_group).is_dir() for folder in folders
    )


def _argument(override: Override, text: str, folders: list[Path]) -> str:
    if override.is_delete() or _is_group(override, folders):
        return text
    key = override.key_or_group
    value = text.partition("=")[2]
    known = schema_keys().get(key)
    # run.name=0123 means the text, not the number that Hydra reads.
    is_number = isinstance(override.value(), (int, float)) and not isinstance(override.value(), bool)
    if known and accepts_text(known.type) and is_number:
        value = f"'{value}'"
    # Forced, because a schema key may be absent from the YAML.
    return f"++{key}={value}"


def _compose(name: str, arguments: list[str], folders: list[Path], violations: list[str]) -> dict[str, Any] | None:
    # Hydra finds the named file in its first folder only (hydra-core 1.3 caches the miss).
    first, *others = sorted(folders, key=lambda folder: not (folder / f"{name}.yaml").is_file())
    if others:
        paths = ",".join('"file://{}"'.format(str(path).replace('"', '\\"')) for path in others)
        arguments = [*arguments, f"hydra.searchpath=[{paths}]"]
    try:
        with initialize_config_dir(str(first), version_base=_VERSION_BASE):
            composed = compose(name, overrides=arguments)
    except yaml.YAMLError as error:
        violations.append(f"--config-name={name}: not valid YAML ({_one_line(error)}). Correct the file.")
        return None
    except _FILE_ERRORS as error:
        violations.append(
            f"--config-name={name}: cannot be composed ({_one_line(error)}). Correct the file or override."
        )
        return None
    return _resolved(composed, violations)


def _resolved(composed: DictConfig, violations: list[str]) -> dict[str, Any]:
    """Return plain values, with interpolations resolved against the YAML and the defaults beneath it."""
    given = OmegaConf.to_container(composed, resolve=False)
    assert isinstance(given, dict)
    try:
        merged = OmegaConf.merge(OmegaConf.create(to_dict(Config())), composed)
    except OmegaConfBaseException:
        # A list where a section belongs cannot be merged; its type is reported later.
        merged = composed
    return {str(name): _plain(merged, name, value, str(name), violations) for name, value in given.items()}


def _plain(parent: Any, name: Any, raw: Any, path: str, violations: list[str]) -> Any:
    # Merging drops the `???` of the YAML in favour of the default beneath it, so it is read from the raw values.
    if isinstance(raw, str) and raw == MISSING:
        return raw
    try:
        node = parent[name]
    except OmegaConfBaseException as error:
        violations.append(f"{path}={raw}: cannot be resolved ({_one_line(error)}). Correct the interpolation.")
        return _default(path)
    if isinstance(node, DictConfig):
        inner = raw if isinstance(raw, dict) else OmegaConf.to_container(node, resolve=False)
        assert isinstance(inner, dict)
        return {str(k): _plain(node, k, v, f"{path}.{k}", violations) for k, v in inner.items()}
    return OmegaConf.to_container(node) if isinstance(node, ListConfig) else node


def _default(path: str) -> Any:
    # Stands in for a value that is already reported, so that it is not reported twice.
    key = schema_keys().get(path)
    return key.default if key else {}


def _one_line(error: Exception) -> str:
    # Hydra wraps some of OmegaConf's errors in an empty one; OmegaConf appends two lines about its own types.
    text = str(error) or str(error.__cause__ or type(error).__name__)
    lines = (line.strip() for line in text.splitlines())
    return " ".join(line for line in lines if line and not line.startswith(("full_key:", "object_type=")))
