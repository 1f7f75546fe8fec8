"""An evaluation on the ranks that were started, and what rank 0 writes of it."""

import sys
from pathlib import Path

from moe_framework.config.schema import Config
from moe_framework.distributed.collectives import together
from moe_framework.distributed.failure import FirstFailure
from moe_framework.distributed.runtime import LaunchEnvironment, Runtime, set_timeouts, start
from moe_framework.errors import ConfigError, ExitCode
from moe_framework.observe.metrics import write_json_atomic
from moe_framework.train.compare import check_same_on_all_ranks
from moe_framework.train.evaluation import evaluate_checkpoint
from moe_framework.train.run import COLLECTIVE_TIMEOUT_S, log_to_stderr
from tools.evaluation.options import Options
from tools.evaluation.progress import BatchProgress
from tools.evaluation.report import report_of, to_text


def run(config: Config, options: Options, launch: LaunchEnvironment) -> int:
    """Evaluate and print.

    Args:
        config: From `valid_config`.
        options: What the user asked for.
        launch: Where this process stands.

    Returns:
        The exit code: 0, or 1 after an unexpected error or without the file of `--json`.

    Raises:
        MoeFrameworkError: What a user can correct; mostly the same on every rank, and then marked on all but rank 0.

    Collective: the world; every rank must call.
    """
    log_to_stderr(enabled=launch.rank == 0)
    failure = None
    try:
        with start(
            launch, config.device, deterministic=config.train.deterministic, timeout_s=COLLECTIVE_TIMEOUT_S
        ) as runtime:
            failure = FirstFailure.of_this_start(runtime.checkpoint_group)
            with failure.telling():
                check_same_on_all_ranks(config, runtime.checkpoint_group)
            with failure, failure.telling():
                code = _evaluate(config, options, runtime)
        return code
    except Exception:
        if failure is None or not failure.told:
            raise
        return ExitCode.FAILED
    finally:
        if failure is not None:
            failure.left()


def _evaluate(config: Config, options: Options, runtime: Runtime) -> ExitCode:
    if options.json is not None:
        path = options.json.expanduser()
        together(lambda: _check_folder(path) if runtime.is_main else None)
    assert isinstance(config.parallel.dp, int), "validate() resolves dp"
    num_data_ranks = config.parallel.dp * config.parallel.ep
    with BatchProgress(enabled=runtime.is_main, num_data_ranks=num_data_ranks) as progress:
        set_timeouts(COLLECTIVE_TIMEOUT_S)
        found = evaluate_checkpoint(config, runtime, split=options.split, hear=progress.heard)
    if not runtime.is_main:
        return ExitCode.DONE
    report = report_of(found, config, options.split)
    print(to_text(report), flush=True)
    if options.json is None:
        return ExitCode.DONE
    try:
        write_json_atomic(options.json.expanduser(), report)
    except OSError as error:  # the report is printed already
        print(f"--json={options.json} is not written ({error}).", file=sys.stderr, flush=True)
        return ExitCode.FAILED
    return ExitCode.DONE


def _check_folder(path: Path) -> None:
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigError(
            f"--json={path} must be a file in a folder that exists. Make {path.parent}, or choose another."
        )
