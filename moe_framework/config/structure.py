"""From a plain nested dict to the frozen dataclasses, with every wrong key and type found in one pass."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from moe_framework.config.keys import unknown_key
from moe_framework.config.schema import Config

MISSING = "???"

_PHRASES = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text", NoneType: "null"}


class _MismatchError(Exception):
    """The value is not of the type."""


def build_config(values: Mapping[str, Any], violations: list[str]) -> Config:
    """Return the dataclasses that `values` describe; keys that are absent keep their defaults.

    Args:
        values: Nested plain values, as YAML gives them.
        violations: Unknown keys and wrong types are appended here; a key in error keeps its default.
    """
    return cast(Config, _build(Config, values, "", violations))


def show(value: Any) -> str:
    """Return a value as a user would write it on the command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)


def accepts_text(kind: Any) -> bool:
    """Return whether a field of this type can hold any text."""
    return str in _alternatives(kind)


def _build(cls: type, values: Mapping[str, Any], prefix: str, violations: list[str]) -> Any:
    hints = get_type_hints(cls)
    given = {}
    for name, value in values.items():
        path = f"{prefix}{name}"
        if name not in hints:
            violations += [unknown_key(leaf, f"{leaf}={show(v)}") for leaf, v in _leaves(path, value)]
        elif isinstance(value, str) and value == MISSING:
            violations.append(f"{path}=??? must be set. Give it on the command line: {path}=VALUE.")
        elif is_dataclass(hints[name]):
            given[name] = _section(cast(type, hints[name]), value, path, violations)
        else:
            try:
                given[name] = _convert(value, hints[name])
            except _MismatchError as mismatch:
                violations.append(f"{path}={show(value)} must be {_describe(hints[name])}.{mismatch}")
    return cls(**given)


def _section(cls: type, value: Any, path: str, violations: list[str]) -> Any:
    if isinstance(value, Mapping):
        return _build(cls, value, f"{path}.", violations)
    example = fields(cls)[0].name
    violations.append(
        f"{path}={show(value)} must be a section with keys. Remove it, or set a key such as {path}.{example}."
    )
    return cls()


def _leaves(path: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        return [leaf for name, inner in value.items() for leaf in _leaves(f"{path}.{name}", inner)]
    return [(path, value)]


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)


def _convert(value: Any, kind: Any) -> Any:
    hints = []
    for alternative in _alternatives(kind):
        try:
            return _convert_to(value, alternative)
        except _MismatchError as mismatch:
            hints.append(str(mismatch))
    raise _MismatchError(max(hints, key=len))


def _convert_to(value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        if value in get_args(kind):
            return value
        raise _MismatchError
    if kind is float:
        return _to_float(value)
    # bool is a subclass of int, but `true` is no number of anything.
    if isinstance(value, kind) and (kind is bool or not isinstance(value, bool)):
        return value
    if kind is int and isinstance(value, float) and value.is_integer():
        raise _MismatchError(f" Write {int(value)}.")
    if kind is int and isinstance(value, str) and (digits := re.fullmatch(r"\+?(-?)0*(\d+)", value)):
        plain = digits[1] + digits[2]
        # Also text without quotes: YAML's number 02 would be octal, so Hydra reads none.
        raise _MismatchError(" Remove the quotes." if plain == value else f" Write {plain}.")
    if kind is str and isinstance(value, (int, float)):
        raise _MismatchError(" Put it in quotes.")
    raise _MismatchError


def _to_float(value: Any) -> float:
    # YAML 1.1 reads 1e-4 as text, because it has no dot.
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise _MismatchError
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _MismatchError from None
    if not math.isfinite(number):
        raise _MismatchError
    return number


def _describe(kind: Any) -> str:
    phrases, choices = [], []
    for alternative in _alternatives(kind):
        if get_origin(alternative) is Literal:
            choices += [show(choice) for choice in get_args(alternative)]
        else:
            phrases.append(_PHRASES[alternative])
    if len(choices) > 1:
        phrases.append("one of " + ", ".join(choices))
    else:
        phrases += choices
    return " or ".join(phrases)
