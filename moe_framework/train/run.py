"""A whole run: start the ranks' process group, build, resume, train, evaluate, summarise."""

import contextlib
import logging
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from moe_framework.config.load import to_yaml
from moe_framework.config.schema import Config
from moe_framework.distributed.collectives import together
from moe_framework.distributed.failure import FirstFailure
from moe_framework.distributed.runtime import LaunchEnvironment, Runtime, launch_environment, set_timeouts, start
from moe_framework.errors import ExitCode
from moe_framework.observe.metrics import write_text_atomic
from moe_framework.observe.throughput import flops_per_token, peak_flops, peak_rss_bytes
from moe_framework.precision.modes import compute_format
from moe_framework.resilience.heartbeat import Heartbeat, open_heartbeat
from moe_framework.resilience.lifeline import Lifeline
from moe_framework.resilience.signals import StopRequest
from moe_framework.resilience.watch import HangWatch
from moe_framework.train.baselines import baselines_of
from moe_framework.train.build import Training, build_training, run_dir
from moe_framework.train.compare import check_same_on_all_ranks
from moe_framework.train.folders import own_folders, writing
from moe_framework.train.loop import evaluate_heldout, train
from moe_framework.train.model import count_parameters
from moe_framework.train.persist import Position, resume
from moe_framework.train.record import start_record
from moe_framework.train.report import Reporter
from moe_framework.train.saving import Saver

logger = logging.getLogger(__name__)

COLLECTIVE_TIMEOUT_S = 1800.0


def run(config: Config) -> int:
    """Train as the config says.

    Args:
        config: Validated for the ranks that were started.

    Returns:
        The exit code: see `ExitCode`.

    Raises:
        MoeFrameworkError: What a user can correct; mostly the same on every rank, and then marked on all but rank 0.

    Collective: the world; every rank must call.
    """
    launch = launch_environment()
    log_to_stderr(enabled=launch.rank == 0)
    failure, code = None, ExitCode.FAILED
    timeout_s = _collective_timeout_s(config)
    try:
        with start(launch, config.device, deterministic=config.train.deterministic, timeout_s=timeout_s) as runtime:
            failure = FirstFailure.of_this_start(runtime.checkpoint_group)
            with failure.telling():
                check_same_on_all_ranks(config, runtime.checkpoint_group)
            with (
                failure,
                StopRequest(launch.stop_file, hopeless=failure.is_known, failed_code=ExitCode.FAILED) as stop,
                failure.telling(),
                open_heartbeat(config.resilience.heartbeat, under_launcher=launch.ft_launcher) as heartbeat,
                own_folders(config, is_main=runtime.is_main),
            ):
                code = _run(config, runtime, stop, heartbeat, failure)
    except Exception:
        if failure is None or not failure.told:
            raise
    finally:
        if failure is not None:
            failure.left()
    return _told_to_launcher(code, launch)


def _run(config: Config, runtime: Runtime, stop: StopRequest, heartbeat: Heartbeat, failure: FirstFailure) -> ExitCode:
    training = build_training(config, runtime)
    set_timeouts(_collective_timeout_s(config))
    with training.store, failure.telling():
        resumed = resume(training)
        position = resumed.position
        record = start_record(training, resumed)
        with record.ending(failure), failure.telling():
            reporter = together(lambda: _start_reports(training, position))
            with contextlib.closing(reporter), _lifeline(training, stop, heartbeat) as lifeline, failure.telling():
                end = train(training, position, reporter, Saver(training, reporter, lifeline), lifeline)
                if end.step < config.train.max_steps:
                    stop.obey()
                    logger.warning("stopped on request after step %d%s", end.step, "" if end == position else "; saved")
                    record.end(ExitCode.STOPPED, step=end.step)
                    return ExitCode.STOPPED
                _summarise(training, reporter, lifeline)
                record.end(ExitCode.DONE, step=end.step)
    return ExitCode.DONE


def _collective_timeout_s(config: Config) -> float:
    """Of gloo and NCCL: longer than the hang watch waits, whose report would be lost with the process."""
    return max(COLLECTIVE_TIMEOUT_S, 2 * config.resilience.hang_timeout_s)


@contextlib.contextmanager
def _lifeline(training: Training, stop: StopRequest, heartbeat: Heartbeat) -> Iterator[Lifeline]:
    config, launch = training.config.resilience, training.runtime.launch
    watch = HangWatch(
        directory=run_dir(training.config) / "hang",
        rank=launch.rank,
        world_size=launch.world_size,
        timeout_s=config.hang_timeout_s,
        abort=config.abort_on_hang,
    )
    watch.attach(training.model)
    with watch:
        yield Lifeline(stop, heartbeat, watch)


def _told_to_launcher(code: ExitCode, launch: LaunchEnvironment) -> int:
    """Return the exit code, or 0 if a launcher reads it from a file: its agent takes any other for a fault."""
    if code != ExitCode.STOPPED or launch.exit_file is None:
        return code
    try:
        if launch.rank == 0:
            write_text_atomic(launch.exit_file, f"{int(code)}\n")
    except OSError as error:
        logger.error(
            "%s cannot be written (%s), so that the launcher is told with the exit code", launch.exit_file, error
        )
        return code
    return ExitCode.DONE


def log_to_stderr(*, enabled: bool) -> None:
    """Write the framework's log to standard error.

    Args:
        enabled: Whether information is written, as on rank 0, and not warnings and errors only.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    package = logging.getLogger("moe_framework")
    package.handlers = [handler]
    package.setLevel(logging.INFO if enabled else logging.WARNING)
    package.propagate = False


def _start_reports(training: Training, position: Position) -> Reporter:
    config, runtime, directory = training.config, training.runtime, run_dir(training.config)
    with writing("run.dir", config.run.dir, directory):
        if runtime.is_main:
            write_text_atomic(directory / "config.yaml", to_yaml(config))
        return Reporter(
            config,
            runtime,
            directory,
            first_step=position.step,
            mfu_per_token_rate=_mfu_per_token_rate(training) if runtime.is_main else 0.0,
        )


def _summarise(training: Training, reporter: Reporter, lifeline: Lifeline) -> None:
    lifeline.note("summary")
    heldout_loss = evaluate_heldout(training, lifeline)
    peak_rss = torch.tensor(peak_rss_bytes())
    dist.all_reduce(peak_rss, op=dist.ReduceOp.MAX, group=training.runtime.checkpoint_group)
    baselines = baselines_of(training.data, training.config.data.heldout_fraction) if training.runtime.is_main else {}
    reporter.summarise({"heldout_loss": heldout_loss} | baselines | {"peak_rss_bytes": peak_rss.item()})


def _mfu_per_token_rate(training: Training) -> float:
    config, sizes = training.config, training.config.model
    total, active = count_parameters(training.model, top_k=sizes.top_k, num_experts=sizes.num_experts)
    logger.info("parameters: %s, of which a token uses %s", f"{total:,}", f"{active:,}")
    each_token = flops_per_token(
        active, sizes.num_layers, sizes.num_heads, sizes.resolved_head_dim, config.data.seq_length
    )
    device = training.runtime.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    return each_token / (
        peak_flops(device.type, name, compute_format(config.precision.mode)) * training.runtime.launch.world_size
    )
