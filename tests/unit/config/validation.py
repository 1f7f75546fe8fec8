"""Validation of L0_sanity with overrides, as the tests of the rules need it."""

from pathlib import Path
from typing import Any

import pytest

from moe_framework.config.load import load_config
from moe_framework.config.validate import validate
from moe_framework.errors import ConfigError

CONFIGS = Path(__file__).resolve().parents[3] / "configs"


def check(overrides: str = "", *, world_size: int = 2, **machine: Any):
    """Validate L0_sanity with overrides."""
    return validate(load_config("L0_sanity", overrides.split(), CONFIGS), world_size=world_size, **machine)


def violations_of(overrides: str, **arguments: Any) -> list[str]:
    """Return every violation."""
    with pytest.raises(ConfigError) as caught:
        check(overrides, **arguments)
    return caught.value.violations
