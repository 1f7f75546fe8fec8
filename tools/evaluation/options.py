"""The command line of tools/evaluate.py, and the configuration that it means. Free of torch."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn

from moe_framework.config.load import load_config
from moe_framework.config.rules import NUCLEOTIDE_VOCAB_SIZE
from moe_framework.config.schema import AUTO, Config
from moe_framework.config.validate import validate
from moe_framework.distributed.runtime import LaunchEnvironment
from moe_framework.errors import ConfigError

CONFIG_DIR = Path(__file__).resolve().parents[2] / "configs"
HELDOUT, ALL = "heldout", "all"


@dataclass(frozen=True)
class Options:
    """What the user asked for.

    Attributes:
        config_name: Name of the YAML file.
        config_dir: Folder that is searched besides the project's own, or None.
        checkpoint: The checkpoint's folder.
        overrides: The `key=value` arguments, in order.
        split: Which rows.
        json: File for the report, or None.
    """

    config_name: str
    config_dir: str | None
    checkpoint: str
    overrides: tuple[str, ...]
    split: Literal["heldout", "all"]
    json: Path | None


class _Parser(argparse.ArgumentParser):
    """Raises instead of ending the process: every rank parses, and rank 0 alone is to print."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; what it cannot parse is a ConfigError."""
    parser = _Parser(
        prog="evaluate.py",
        description="Measure the loss of a checkpoint.",
        usage="%(prog)s --config-name NAME CHECKPOINT [KEY=VALUE ...] [--split heldout|all] [--json FILE]",
        add_help=False,
        allow_abbrev=False,
    )
    parser.add_argument("-h", "--help", action="store_true", help="print this text and stop")
    parser.add_argument("-cn", "--config-name", metavar="NAME", help="the configuration, a YAML file without ending")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of your own beside configs/")
    parser.add_argument(
        "--split",
        choices=(HELDOUT, ALL),
        default=HELDOUT,
        help="the held-out rows, or every row, for a file that is a test set (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CHECKPOINT KEY=VALUE",
        help="a step folder, a folder of steps, a Hugging Face folder or a Megatron-Core checkpoint; and settings that "
        "beat the YAML, such as data.path=FILE or eval.max_rows=N (otherwise all rows are used)",
    )
    return parser


def parse(argv: Sequence[str]) -> Options | None:
    """Parse the command line.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The options; None where help was asked for.

    Raises:
        ConfigError: It cannot be parsed.
    """
    parsed = build_parser().parse_intermixed_args(argv)
    if parsed.help:
        return None
    violations = []
    if not parsed.config_name:
        violations.append("--config-name is missing. Give the configuration that the checkpoint was trained with.")
    checkpoint = _checkpoint_of(parsed.words)
    if checkpoint is None:
        violations.append("CHECKPOINT is missing. Give the folder of a checkpoint, before the settings.")
    if violations:
        raise ConfigError(violations)
    assert checkpoint is not None, "it is a violation"
    overrides = list(parsed.words)
    overrides.remove(checkpoint)
    return Options(
        parsed.config_name, parsed.config_dir, checkpoint, tuple(overrides), split=parsed.split, json=parsed.json
    )


def _checkpoint_of(words: Sequence[str]) -> str | None:
    """The first word that is no setting; a path may have `=` in it, but not before its first slash."""
    return next((word for word in words if "=" not in word or "/" in word.partition("=")[0]), None)


def valid_config(options: Options, launch: LaunchEnvironment) -> Config:
    """Compose the configuration of an evaluation and check it against the ranks that were started.

    What only training needs is set aside: where a run starts, its global batch, and `eval.max_rows` of the YAML, which
    is for evaluations on the way.

    Raises:
        ConfigError: Every violation, the same on every rank.
    """
    config = load_config(options.config_name, options.overrides, CONFIG_DIR, options.config_dir)
    checkpoint, parallel = str(Path(options.checkpoint).expanduser()), config.parallel
    num_data_ranks = max(launch.world_size // max(parallel.tp, 1), 1)
    limited = any(override.lstrip("+").partition("=")[0] == "eval.max_rows" for override in options.overrides)
    config = replace(
        config,
        train=replace(
            config.train,
            global_batch_size=max(config.train.micro_batch_size, 1) * num_data_ranks,
            dry_run=False,
        ),
        eval=config.eval if limited else replace(config.eval, max_rows=0),
        checkpoint=replace(config.checkpoint, init_from=None, resume=AUTO),
    )
    config = validate(config, world_size=launch.world_size, local_world_size=launch.local_world_size)
    vocab_size = config.model.vocab_size
    if config.data.path is None and vocab_size != NUCLEOTIDE_VOCAB_SIZE:
        raise ConfigError(
            f"data.path=null is the E. coli genome of the demo, which says nothing about a model of "
            f"model.vocab_size={vocab_size}. Set data.path."
        )
    return replace(config, checkpoint=replace(config.checkpoint, init_from=checkpoint))
