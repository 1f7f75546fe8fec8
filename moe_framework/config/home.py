"""A leading `~` in the paths of a configuration, which means the home folder.

A shell expands it at the start of a word only, not in `checkpoint.ckpt_dir=~/ck`, in quotes or in YAML.
"""

import os
import re
from dataclasses import replace

from moe_framework.config.schema import Config

PATH_KEYS = ("run.dir", "checkpoint.ckpt_dir", "checkpoint.resume", "checkpoint.init_from", "data.path")


def quote_home(override: str) -> str:
    """Quote the value of a path key that has a `~`, which Hydra's grammar knows inside quotes only.

    Args:
        override: `key=value`, as it was typed.

    Returns:
        The same with quotes around the value, where they are needed.
    """
    key, _, value = override.partition("=")
    needed = key.lstrip("+") in PATH_KEYS and "~" in value and not re.search(r"^[\"\[{]|'", value)
    return f"{key}='{value}'" if needed else override


def expand_home(config: Config, violations: list[str]) -> Config:
    """Return the configuration with the home folder in the place of each leading `~` or `~user`.

    Args:
        config: What the user gave; `data.path` may have several paths with weights.
        violations: Users that are not known are appended here.
    """
    for key in PATH_KEYS:
        section, _, name = key.partition(".")
        text = getattr(getattr(config, section), name)
        if text is None:
            continue
        begins_a_path = re.compile(r"(?<!\S)~\S*" if _is_weighted(key, text) else r"^~.*")
        path = begins_a_path.sub(lambda found: os.path.expanduser(found[0]), text)
        unknown = begins_a_path.search(path)
        if unknown:
            violations.append(
                f"{key}={text}: no user is known whose home folder {unknown[0]} could begin with. Give the whole path, "
                f"or write ./{unknown[0]} for a folder of that name."
            )
        config = replace(config, **{section: replace(getattr(config, section), **{name: path})})
    return config


def _is_weighted(key: str, text: str) -> bool:
    """Whether a value is `weight path weight path …`; the weights are checked where the data are opened."""
    words = text.split()
    return key == "data.path" and len(words) > 1 and re.fullmatch(r"[\d.eE+-]+", words[0]) is not None
