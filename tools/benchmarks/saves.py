"""The `saves` benchmark: what a save in the background and one in the foreground cost training, and the heartbeat."""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from moe_framework.checkpoint.state import model_tensors, optimizer_tensors
from moe_framework.checkpoint.store import CheckpointStore
from moe_framework.distributed.runtime import launch_environment
from moe_framework.resilience.heartbeat import Heartbeat, open_heartbeat
from moe_framework.train.build import mesh_of, optimizer_of
from moe_framework.train.model import build_model, choose_backend
from moe_framework.train.step import Objective, agree_on_counts, train_step
from tools.benchmarks.dispatch import slowest
from tools.benchmarks.machine import Machine, describe
from tools.benchmarks.ranks import measure_on_ranks
from tools.benchmarks.saves_options import Options
from tools.benchmarks.timing import Spread, ratio
from tools.benchmarks.train_step.ours import draw_on_device, synthetic_batch

BACKGROUND, FOREGROUND = "background", "foreground"


@dataclass(frozen=True)
class Save:
    """What one way of saving costs; times in seconds, of the slowest rank.

    Attributes:
        stall: For which the call kept training waiting.
        staging: Of it, for taking hold of the values: in the background, for copying them.
        published: From the call to the published step.
        steps_meanwhile: Training steps that ended in that time; the median.
        step_meanwhile: Duration of such a step; None where there is none.
        cost: The stall, and what the steps meanwhile took longer than the median step without a save.
        stall_over_step: Stall over the median step without a save of the same repetition.
    """

    stall: Spread
    staging: Spread
    published: Spread
    steps_meanwhile: float
    step_meanwhile: Spread | None
    cost: Spread
    stall_over_step: Spread


@dataclass(frozen=True)
class Beats:
    """What the heartbeat costs.

    Attributes:
        has_monitor: Whether NVRx's ft_launcher listens; else there is nothing to send.
        calls: Calls, one a step.
        mean: Seconds of a call on the slowest rank.
        longest: Seconds of the longest call: one that sends.
        share_of_step: All calls over all steps.
    """

    has_monitor: bool
    calls: int
    mean: float
    longest: float
    share_of_step: float


@dataclass(frozen=True)
class Report:
    """What the benchmark found.

    Attributes:
        options: As asked.
        device_type: `cpu` or `cuda`.
        machine: Of rank 0.
        num_parameters: Of the model.
        step_bytes: Of a saved step.
        step: Seconds of a training step without a save.
        saves: By way of saving.
        stall_ratio: Foreground over background, of the same repetition.
        heartbeat: Its cost.
    """

    options: Options
    device_type: str
    machine: Machine
    num_parameters: int
    step_bytes: int
    step: Spread
    saves: dict[str, Save]
    stall_ratio: Spread
    heartbeat: Beats


def run(options: Options) -> Report | None:
    """Measure.

    Args:
        options: The command line.

    Returns:
        The report; None on ranks other than 0, where a launcher has started them.

    Raises:
        ConfigError: Too few GPUs.
    """
    return measure_on_ranks(measure_saves, options)


def measure_saves(group: dist.ProcessGroup, device: torch.device, options: Options) -> Report:
    """Train, save in both ways in turn, and time all of it, in a started process group.

    Args:
        group: The world.
        device: This rank's.
        options: The command line.

    Returns:
        The report; times are the same on every rank.

    Collective: `group`; every rank must call.
    """
    run_ = _Run(options, group, device)
    with _shared_folder(options.folder, group) as folder, _heartbeat() as heartbeat:
        stores = {
            way: CheckpointStore(folder / way, keep=2, async_save=way == BACKGROUND, group=_new_group())
            for way in (BACKGROUND, FOREGROUND)
        }
        samples: list[_Repetition] = []
        for number in range(options.warmup + options.repetitions):
            repetition = _repeat(run_, stores, heartbeat, number)
            if number >= options.warmup:
                samples.append(repetition)
            if group.rank() == 0:
                print(f"repetition {number + 1}: {repetition.line()}", file=sys.stderr, flush=True)
        step_bytes = sum(path.stat().st_size for path in next((folder / FOREGROUND).glob("step_*")).iterdir())
        for store in stores.values():
            store.close()
        dist.barrier(group)
    return _summarise(run_, samples, step_bytes)


class _Run:
    """A model that trains on one batch of random tokens, as a run's loop would."""

    def __init__(self, options: Options, group: dist.ProcessGroup, device: torch.device):
        config = options.config
        mesh = mesh_of(config, device.type)
        self.options, self.group, self.device = options, group, device
        self.model = build_model(config, mesh, device, choose_backend(config, device), draw=draw_on_device)
        self.optimizer = optimizer_of(config, self.model)
        rows = mesh.num_data_ranks * config.train.micro_batch_size
        batch = synthetic_batch(config, device, seed=options.seed, data_rank=mesh.data_rank)
        batches = [batch] * (config.train.global_batch_size // rows)
        objective = Objective(config.moe.aux_loss_coeff, config.moe.z_loss_coeff)

        def step() -> None:
            counts = agree_on_counts(batches, mesh.data_group)
            clip_norm = config.optim.clip_norm
            train_step(self.model, self.optimizer, batches, counts, mesh=mesh, objective=objective, clip_norm=clip_norm)

        self.step: Callable[[], None] = step

    def timed(self, action: Callable[[], object]) -> float:
        """Seconds of the slowest rank; ranks start together, and a GPU's work is waited for."""
        dist.barrier(self.group)
        began = time.perf_counter()
        action()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self.slowest([time.perf_counter() - began])[0]

    def slowest(self, seconds: list[float]) -> list[float]:
        """Element by element, those of the slowest rank."""
        return slowest(seconds, self.group, self.device)

    def save(self, store: CheckpointStore, step: int) -> None:
        """Save as `train/persist.py` does."""
        store.save(step, model_tensors(self.model) | optimizer_tensors(self.model, self.optimizer), {})


@dataclass
class _Saved:
    stall: float
    staging: float
    published: float
    meanwhile: list[float]


@dataclass
class _Repetition:
    steps: list[float]
    beats: list[float]
    saves: dict[str, _Saved]

    @property
    def step(self) -> float:
        return Spread.of(self.steps).median

    def cost(self, way: str) -> float:
        """Seconds by which a save makes training longer."""
        saved = self.saves[way]
        return saved.stall + sum(seconds - self.step for seconds in saved.meanwhile)

    def line(self) -> str:
        stalls = ", ".join(f"{way} stall {1e3 * saved.stall:.1f} ms" for way, saved in self.saves.items())
        return f"step {1e3 * self.step:.1f} ms, {stalls}"


def _repeat(run_: _Run, stores: dict[str, CheckpointStore], heartbeat: Heartbeat, number: int) -> _Repetition:
    steps, beats = [], []
    for _ in range(run_.options.steps):
        began = time.perf_counter()
        heartbeat.beat()
        beats.append(time.perf_counter() - began)
        steps.append(run_.timed(run_.step))
    repetition = _Repetition(steps, run_.slowest(beats), {})
    for way in list(stores)[:: 1 if number % 2 == 0 else -1]:
        repetition.saves[way] = _save_and_train(run_, stores[way], number + 1)
    return repetition


def _save_and_train(run_: _Run, store: CheckpointStore, step: int) -> _Saved:
    began = time.perf_counter()
    stall = run_.timed(lambda: run_.save(store, step))
    (staging,) = run_.slowest([store.staging_s])
    meanwhile = []
    while not store.poll():
        meanwhile.append(run_.timed(run_.step))
    (published,) = run_.slowest([time.perf_counter() - began])
    return _Saved(stall, staging, published, meanwhile)


def _summarise(run_: _Run, samples: list[_Repetition], step_bytes: int) -> Report:
    saves = {}
    for way in (BACKGROUND, FOREGROUND):
        saved = [repetition.saves[way] for repetition in samples]
        meanwhile = [seconds for one in saved for seconds in one.meanwhile]
        saves[way] = Save(
            stall=Spread.of([one.stall for one in saved]),
            staging=Spread.of([one.staging for one in saved]),
            published=Spread.of([one.published for one in saved]),
            steps_meanwhile=Spread.of([float(len(one.meanwhile)) for one in saved]).median,
            step_meanwhile=Spread.of(meanwhile) if meanwhile else None,
            cost=Spread.of([repetition.cost(way) for repetition in samples]),
            stall_over_step=ratio([one.stall for one in saved], [repetition.step for repetition in samples]),
        )
    steps = [seconds for repetition in samples for seconds in repetition.steps]
    beats = [seconds for repetition in samples for seconds in repetition.beats]
    stalls = {way: [repetition.saves[way].stall for repetition in samples] for way in saves}
    return Report(
        options=run_.options,
        device_type=run_.device.type,
        machine=describe(run_.device),
        num_parameters=sum(p.numel() for p in run_.model.parameters()),
        step_bytes=step_bytes,
        step=Spread.of(steps),
        saves=saves,
        stall_ratio=ratio(stalls[FOREGROUND], stalls[BACKGROUND]),
        heartbeat=Beats(
            launch_environment().ft_launcher, len(beats), sum(beats) / len(beats), max(beats), sum(beats) / sum(steps)
        ),
    )


@contextmanager
def _shared_folder(parent: Path | None, group: dist.ProcessGroup) -> Iterator[Path]:
    """Make a folder for all ranks on rank 0, and remove it after the block."""
    names: list[str | None] = [tempfile.mkdtemp(prefix="saves_", dir=parent) if group.rank() == 0 else None]
    dist.broadcast_object_list(names, group=group, group_src=0)
    folder = Path(str(names[0]))
    try:
        yield folder
    finally:
        if group.rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _heartbeat() -> Heartbeat:
    return open_heartbeat("auto", under_launcher=launch_environment().ft_launcher)


def _new_group() -> dist.ProcessGroup:
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    return group
