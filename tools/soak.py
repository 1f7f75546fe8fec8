"""Train through random faults, and show that nothing is lost by them.

python tools/soak.py --faults 100 --seed 0 --json soak.json
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

DIFFERS_EXIT_CODE = 1


def main(argv: Sequence[str]) -> int:
    """Run once without faults and once with them, compare, and print a table of the recoveries.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The exit code: 0; 1 if the run did not end, a loss differs, a complete step was lost or something was left over;
        2 for an error that the user can correct.

    Raises:
        SystemExit: The command line cannot be parsed, or asks for help.
    """
    from moe_framework.errors import MoeFrameworkError
    from tools.command_line import show_error
    from tools.soaking import report, soak

    arguments = parse(argv)
    try:
        found = soak.soak(
            num_faults=arguments.faults,
            seed=arguments.seed,
            num_ranks=arguments.ranks,
            launcher=arguments.launcher or soak.default_launcher(),
            folder=arguments.folder,
            overrides=arguments.overrides,
        )
    except MoeFrameworkError as error:
        return show_error(error)
    print(report.to_text(found))
    if arguments.json is not None:
        report.write_json(found, arguments.json)
    return 0 if found.ok else DIFFERS_EXIT_CODE


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        SystemExit: It cannot be parsed, or asks for help.
    """
    from tools.command_line import positive
    from tools.soaking.soak import LAUNCHERS

    parser = argparse.ArgumentParser(prog="soak.py", description="Train through random faults.")
    parser.add_argument("--faults", type=positive, default=10, metavar="N", help="faults (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the faults (default: %(default)s)")
    parser.add_argument("--ranks", type=positive, default=2, metavar="R", help="ranks (default: %(default)s)")
    parser.add_argument("--launcher", choices=LAUNCHERS, help="what restarts the ranks (default: ft_launcher if there)")
    parser.add_argument("--folder", type=Path, help="keep the runs here (default: a temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result here as well")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="changes to L0_sanity")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
