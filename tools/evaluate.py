"""Measure the loss of a checkpoint on held-out rows, or on a whole test set, at any layout.

python tools/evaluate.py --config-name L0_sanity runs/L0_sanity/checkpoints parallel.ep=1
torchrun --nproc_per_node=2 tools/evaluate.py --config-name L0_sanity runs/L0_sanity/checkpoints --json loss.json
"""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path


def main(argv: Sequence[str]) -> int:
    """Evaluate.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The exit code: 0; 1 after an unexpected error; 2 for an error that the user can correct; 130 after Ctrl-C.

    Collective: the world, once the configuration is valid; every rank must call.
    """
    from moe_framework.distributed.runtime import LaunchEnvironment, launch_environment
    from moe_framework.errors import ExitCode, MoeFrameworkError
    from tools.command_line import INTERRUPTED_EXIT_CODE
    from tools.evaluation import options
    from train_fsdp2_ep import report

    # Said by torch on every rank, about a package that nvidia-resiliency-ext 0.4 brings.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    launch, started = LaunchEnvironment(), False
    try:
        launch = launch_environment()
        asked = options.parse(argv)
        if asked is None:
            if launch.rank == 0:
                print(options.build_parser().format_help(), end="", flush=True)
            return ExitCode.DONE
        config = options.valid_config(asked, launch)
        # torch takes seconds to import, so it comes after everything that can be wrong with the command line.
        from tools.evaluation.ranks import run

        started = True
        return run(config, asked, launch)
    except MoeFrameworkError as error:
        # Until the ranks are started they know the same, and find the same.
        error.said_elsewhere |= not started and launch.rank != 0
        report(error, launch.rank)
        return ExitCode.USER_ERROR
    except KeyboardInterrupt:
        return INTERRUPTED_EXIT_CODE


if __name__ == "__main__":
    # Started as a file, Python looks for modules in tools/ and not in the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
