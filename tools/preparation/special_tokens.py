"""Which token ends a document: as told, or as a model's folder says."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_framework.errors import DataError

# Each file with the key that names the token, by its text or its number.
_SOURCES = (
    ("tokenizer_config.json", "eos_token"),
    ("special_tokens_map.json", "eos_token"),
    ("generation_config.json", "eos_token_id"),
    ("config.json", "eos_token_id"),
)
_GIVE = "Give --eos=TOKEN, or --no-eos to store documents without one."


@dataclass(frozen=True)
class SpecialToken:
    """A token that is no text.

    Attributes:
        token: How the tokenizer writes it.
        id: Its number.
        origin: Who named it: an option or a file.
    """

    token: str
    id: int
    origin: str


def named_token(option: str, token: str, vocabulary: Mapping[str, int]) -> SpecialToken:
    """Return a token that the user names.

    Args:
        option: The option, for messages.
        token: How the tokenizer writes it.
        vocabulary: Number of each token.

    Raises:
        DataError: It is no token of the vocabulary.
    """
    if token not in vocabulary:
        known = [known for known in vocabulary if known.startswith("<") and known.endswith(">") and len(known) > 2]
        examples = f", such as {', '.join(sorted(known, key=vocabulary.__getitem__)[:6])}" if known else ""
        raise DataError(f"{option}={token}: no token of the tokenizer. Give one that it has{examples}.")
    return SpecialToken(token, vocabulary[token], option)


def end_of_document(folder: Path | None, vocabulary: Mapping[str, int]) -> SpecialToken:
    """Return the token that a model's folder calls the end of a sequence.

    Args:
        folder: Where the tokenizer is, with the files that belong to it; None where it is a file by itself.
        vocabulary: Number of each token.

    Raises:
        DataError: No file says it, or one says something else than one token of the vocabulary.
    """
    if folder is None:
        raise DataError(f"--eos: a tokenizer without its folder does not say which token ends a document. {_GIVE}")
    for name, key in _SOURCES:
        value = read_json(folder / name).get(key)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, list) and len(value) == 1:
            value = value[0]
        if value is None:
            continue
        found = _find(value, vocabulary)
        if found is None:
            raise DataError(f"{folder / name}: {key}={json.dumps(value)} is not one token of the tokenizer. {_GIVE}")
        return SpecialToken(*found, origin=name)
    names = ", ".join(name for name, _ in _SOURCES)
    raise DataError(f"--eos: none of {names} in {folder} says which token ends a document. {_GIVE}")


def read_json(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, which is empty if there is no such file.

    Raises:
        DataError: It is something else, or cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: not a JSON file that can be read ({error}). Correct or remove it.") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: not a JSON object. Correct or remove it.")
    return found


def _find(value: object, vocabulary: Mapping[str, int]) -> tuple[str, int] | None:
    if isinstance(value, str):
        return (value, vocabulary[value]) if value in vocabulary else None
    return next(((token, number) for token, number in vocabulary.items() if number == value), None)
