"""Check that parallel layouts compute what one rank computes.

python tools/check_parity.py --config-name L0_sanity --layouts "dp=1,ep=2,tp=1;dp=2,ep=2,tp=1" --steps 3
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tools.parity.plan import Plan

CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"
DIFFERS_EXIT_CODE = 1


def main(argv: Sequence[str]) -> int:
    """Run the layouts, print the verdicts, and write them as JSON where that was asked for.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The exit code: 0; 1 if any layout differs from one rank; 2 for an error that the user can correct.

    Raises:
        SystemExit: The command line cannot be parsed, or asks for help.
    """
    from moe_framework.errors import MoeFrameworkError
    from tools.command_line import show_error

    # Said whenever torch is imported, about a package that nvidia-resiliency-ext 0.4 brings. The ranks get the options.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    sys.warnoptions.append("ignore:The pynvml package is deprecated:FutureWarning")
    arguments = parse(argv)
    try:
        plan = planned(arguments)
        # torch takes seconds to import, so it comes after everything that can be wrong with the command line.
        from tools.parity import execute, report

        found = execute.execute(plan)
        print(report.to_text(found))
        if arguments.json is not None:
            report.write_json(found, arguments.json)
    except MoeFrameworkError as error:
        return show_error(error)
    return 0 if found.ok else DIFFERS_EXIT_CODE


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        SystemExit: It cannot be parsed, or asks for help.
    """
    from moe_framework.precision.modes import MODES
    from tools.command_line import positive
    from tools.parity.known_faults import KNOWN_FAULTS
    from tools.parity.plan import CONFIGURED, RANDOM

    parser = argparse.ArgumentParser(prog="check_parity.py", description="Compare parallel layouts with one rank.")
    parser.add_argument("-cn", "--config-name", metavar="NAME", required=True, help="the configuration")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of your own beside configs/")
    parser.add_argument(
        "--layouts",
        required=True,
        metavar="LAYOUTS",
        help="degrees to check, such as 'dp=1,ep=2,tp=1;dp=2,ep=2,tp=2,dp_replicate=2,expert_tp=2'",
    )
    parser.add_argument("--steps", type=positive, default=3, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--precision", choices=tuple(MODES), help="precision.mode (default: the configuration's)")
    parser.add_argument("--layers", type=positive, help="blocks, for a model too large for one rank")
    parser.add_argument(
        "--accumulation",
        type=_positives,
        default=(),
        metavar="A,B",
        help="micro-batches per step, each checked (default: what train.micro_batch_size gives)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights, tokens and order (default: %(default)s)")
    parser.add_argument(
        "--data",
        choices=(RANDOM, CONFIGURED),
        default=RANDOM,
        help="made-up documents over the whole vocabulary, or the configuration's data (default: %(default)s)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts as JSON")
    parser.add_argument("--inject", choices=tuple(KNOWN_FAULTS), help="put a known error into the layouts' ranks")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="beats the configuration")
    return parser.parse_intermixed_args(argv)


def planned(arguments: argparse.Namespace) -> "Plan":
    """Derive and check the configurations of the layouts; torch is not needed.

    Raises:
        ConfigError: Layouts that cannot be read, or any rule that a layout breaks.
    """
    from moe_framework.config.load import load_config
    from tools.parity.layouts import parse_layouts
    from tools.parity.plan import Options, make_plan

    layouts = parse_layouts(arguments.layouts)
    config = load_config(arguments.config_name, arguments.overrides, CONFIG_DIR, arguments.config_dir)
    options = Options(
        steps=arguments.steps,
        layers=arguments.layers,
        precision=arguments.precision,
        accumulation=arguments.accumulation,
        seed=arguments.seed,
        data=arguments.data,
        inject=arguments.inject,
    )
    return make_plan(config, layouts, options)


def _positives(text: str) -> tuple[int, ...]:
    from tools.command_line import positive

    return tuple(dict.fromkeys(positive(part.strip()) for part in text.split(",")))


if __name__ == "__main__":
    # Started as a file, Python looks for modules in tools/ and not in the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
