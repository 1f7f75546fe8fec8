"""The layers of CONTRIBUTING.md hold in every source file, and each rule is seen to catch a violation."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import layers
from tests.helpers.layers import Module

ROOT = Path(__file__).parents[2]
RULES = [
    layers.layer_violations,
    layers.dependency_violations,
    layers.environment_violations,
    layers.global_violations,
    layers.import_time_violations,
    layers.early_torch_violations,
]


def project_modules() -> list[Module]:
    files = [*ROOT.glob("moe_framework/**/*.py"), *ROOT.glob("tools/**/*.py"), ROOT / "train_fsdp2_ep.py"]
    modules = []
    for file in sorted(files):
        parts = file.relative_to(ROOT).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        modules.append(layers.parse(name, file.read_text(encoding="utf-8"), is_package=is_package))
    return modules


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_every_source_file_keeps_the_rule(rule: Callable[[Module], list[str]]):
    modules = project_modules()
    assert {"moe_framework.errors", "train_fsdp2_ep"} <= {module.name for module in modules}
    assert [violation for module in modules for violation in rule(module)] == []


def test_configuration_and_entry_load_without_torch():
    names = [m.name for m in project_modules() if m.layer in ("config", "errors", "entry")]
    code = f"import sys, {', '.join(names)}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("moe_framework.moe.router", "from moe_framework.model.block import Block"),
        ("moe_framework.moe.router", "import moe_framework.train.loop"),
        ("moe_framework.moe.router", "def f():\n    from moe_framework.config import schema"),
        ("moe_framework.moe.router", "from ..train import loop"),
        ("moe_framework.moe.router", "from moe_framework import train"),
        ("moe_framework.optim.clip", "from moe_framework.parallel import apply"),
        ("moe_framework.config.load", "from moe_framework.data import fasta"),
        ("moe_framework.errors", "from moe_framework.distributed import runtime"),
        ("moe_framework", "from moe_framework.errors import ConfigError"),
        ("moe_framework.moe.router", "from moe_framework.unheard_of import x"),
        ("moe_framework.unheard_of.x", "import torch"),
        (
            "moe_framework.moe.router",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import moe_framework.train",
        ),
    ],
)
def test_an_import_from_a_higher_or_sibling_layer_is_caught(name: str, source: str):
    assert len(layers.layer_violations(layers.parse(name, source))) == 1


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("moe_framework.train.loop", "from moe_framework.optim.clip import clip\nfrom moe_framework import errors"),
        ("moe_framework.moe.layer", "from .router import Router\nfrom moe_framework.moe.permute import permute"),
        ("moe_framework.model.block", "from ..moe import layer"),
        ("moe_framework.errors", "import json"),
        ("tools.benchmark", "import moe_framework.train.build"),
        ("train_fsdp2_ep", "from moe_framework.config.load import load"),
    ],
)
def test_an_import_from_the_own_or_a_lower_layer_is_allowed(name: str, source: str):
    assert layers.layer_violations(layers.parse(name, source)) == []


def test_a_packages_relative_imports_start_at_itself():
    source = "from .router import Router\nfrom ..train import loop"
    (violation,) = layers.layer_violations(layers.parse("moe_framework.moe", source, is_package=True))
    assert "moe_framework.train.loop" in violation


@pytest.mark.parametrize(
    ("name", "source", "caught"),
    [
        ("moe_framework.model.decoder", "def f():\n    import transformers", True),
        ("moe_framework.model.decoder", "from transformers.models import mixtral", True),
        ("moe_framework.model.decoder", "from transformer_engine import pytorch", True),
        ("moe_framework.moe.experts.te", "from transformer_engine import pytorch", False),
        ("moe_framework.moe.experts.tensor", "import transformer_engine", True),
        ("moe_framework.train.loop", "import nvidia_resiliency_ext.inprocess", True),
        ("moe_framework.resilience.heartbeat", "import nvidia_resiliency_ext.inprocess", False),
    ],
)
def test_a_heavy_dependency_outside_its_home_is_caught(name: str, source: str, caught: bool):
    assert bool(layers.dependency_violations(layers.parse(name, source))) is caught


@pytest.mark.parametrize(
    "source",
    [
        "import os\ndef f():\n    return os.environ['RANK']",
        "import os as system\nx = system.getenv('RANK')",
        "import os.path\nx = os.environ",
        "from os import environ",
        "def f():\n    import os\n    os.putenv('A', 'b')",
    ],
)
def test_reading_the_environment_is_caught_everywhere_but_in_its_reader(source: str):
    assert len(layers.environment_violations(layers.parse("tools.doctor", source))) == 1
    assert layers.environment_violations(layers.parse(layers.ENVIRONMENT_READER, source)) == []


def test_other_uses_of_os_are_no_violation():
    source = "import os\nfrom os import path\nx = os.path.sep\ny = config.environ"
    assert layers.environment_violations(layers.parse("moe_framework.moe.x", source)) == []


def test_a_global_statement_is_caught():
    source = "x = 0\ndef f():\n    global x\n    x = 1"
    assert len(layers.global_violations(layers.parse("moe_framework.moe.x", source))) == 1


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("print('hello')", True),
        ("import torch\ntorch.manual_seed(0)", True),
        ("if True:\n    print('hello')", True),
        ("try:\n    import x\nexcept ImportError:\n    print('no x')", True),
        ("class A:\n    print('hello')", True),
        ("def f():\n    print('hello')", False),
        ("class A:\n    def f(self):\n        print('hello')", False),
        ("if __name__ == '__main__':\n    main()", False),
        ('"""Docstring."""\nx = frozenset([1])', False),
    ],
)
def test_work_at_import_time_is_caught(source: str, caught: bool):
    assert bool(layers.import_time_violations(layers.parse("moe_framework.moe.x", source))) is caught


@pytest.mark.parametrize(
    ("name", "source", "caught"),
    [
        ("moe_framework.config.load", "import torch", True),
        ("moe_framework.errors", "from torch import nn", True),
        ("train_fsdp2_ep", "import torch.distributed as dist", True),
        ("train_fsdp2_ep", "try:\n    import torch\nexcept ImportError:\n    pass", True),
        ("train_fsdp2_ep", "def main():\n    import torch", False),
        ("moe_framework.config.load", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", False),
        ("moe_framework.moe.x", "import torch", False),
    ],
)
def test_torch_at_the_module_level_of_config_and_entry_is_caught(name: str, source: str, caught: bool):
    assert bool(layers.early_torch_violations(layers.parse(name, source))) is caught
