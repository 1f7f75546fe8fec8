"""What the ranks of the hang tests run: training steps under the watch, some of them with a fault."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.distributed.runtime import launch_environment, start
from moe_framework.model.decoder import Decoder
from moe_framework.moe.dispatch.base import Dispatched
from moe_framework.optim.adamw import build_adamw
from moe_framework.resilience.hang_folder import HangFolder
from moe_framework.resilience.watch import HangWatch
from moe_framework.train.evaluate import measure
from moe_framework.train.step import agree_on_counts, train_step
from tests.distributed.parity_jobs import CLIP_NORM, OBJECTIVE, OPTIM, Layout, Spec, built, micro_batches, parameters_of
from tests.distributed.step_jobs import num_compiled_graphs

TIMEOUT_S = 1.5
# Collectives that nobody will complete end with an error after this: the ranks are used again.
GIVE_UP_S = 10.0
LAST_STEP = 2

type Fault = Callable[[Decoder, HangFolder], None]


class Run(NamedTuple):
    """What came out of some steps.

    Attributes:
        losses: Of each step.
        parameters: After the last; whole tensors.
        heldout: Loss of an evaluation after them.
        num_graphs: Graphs that were compiled meanwhile.
        places: Distinct marks of the last step, as text.
    """

    losses: list[float]
    parameters: dict[str, Tensor]
    heldout: float
    num_graphs: int
    places: list[str]


def steps(spec: Spec, layout: Layout, directory: Path, *, watched: bool) -> Run:
    """Train for some steps, with or without the watch."""
    model, mesh = built(spec, layout)
    optimizer = build_adamw(model, **OPTIM, compiled=layout.compiled)
    before, losses, places = num_compiled_graphs(), [], []
    with contextlib.ExitStack() as stack:
        watch = _watch(directory, timeout_s=60.0 if watched else 0.0)
        watch.attach(model)
        stack.enter_context(watch)
        for step in range(1, LAST_STEP + 1):
            watch.begin_step(step)
            losses.append(_step(model, optimizer, mesh, spec, layout, step))
        places = [str(mark.place) for mark in watch._log.marks() if mark.place.step == LAST_STEP]
        watch.note("evaluation")
        batches = _batches(mesh, spec, layout, 0)
        heldout = measure(model, batches, mesh=mesh, device=torch.device("cpu")).loss
    assert not directory.exists()
    return Run(losses, parameters_of(model), heldout, num_compiled_graphs() - before, places)


def broken(spec: Spec, layout: Layout, directory: Path, fault: Fault, on_rank: int, *, abort: bool = False) -> str:
    """Train under the watch until the last step, in which one rank has a fault; return the error that ended it."""
    dist.barrier()
    dist.destroy_process_group()
    try:
        with start(launch_environment(), "cpu", timeout_s=GIVE_UP_S) as runtime:
            model, mesh = built(spec, layout)
            optimizer = build_adamw(model, **OPTIM)
            watch = _watch(directory, timeout_s=TIMEOUT_S, abort=abort)
            watch.attach(model)
            with watch:
                for step in range(1, LAST_STEP + 1):
                    watch.begin_step(step)
                    if step == LAST_STEP and runtime.launch.rank == on_rank:
                        fault(model, HangFolder(directory))
                    _step(model, optimizer, mesh, spec, layout, step)
    except RuntimeError as error:
        return str(error)
    return ""


def skips_the_dispatch_of_layer_1(model: Decoder, _folder: HangFolder) -> None:
    """Let this rank keep its tokens in one layer instead of exchanging them."""
    watched: Any = model.layers[1].moe.dispatcher  # pyright: ignore
    watched.inner = _Selfish(watched.inner)


def blocks_in_attention_of_layer_1(model: Decoder, folder: HangFolder) -> None:
    """Let this rank stay in one layer until the page is written."""
    model.layers[1].attention.register_forward_pre_hook(lambda *_: _wait_for_page(folder))  # pyright: ignore


def blocks_in_backward_of_layer_2(model: Decoder, folder: HangFolder) -> None:
    """Let this rank stay in one layer's backward until the page is written."""

    def wait_in_backward(_module: Any, _inputs: Any, output: tuple[Tensor, Any]) -> None:
        output[0].register_hook(lambda _: _wait_for_page(folder))

    model.layers[2].moe.register_forward_hook(wait_in_backward)  # pyright: ignore


def _wait_for_page(folder: HangFolder) -> None:
    deadline = time.monotonic() + GIVE_UP_S - 2
    while not folder.page_path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    # So that the other ranks' files are looked at before this rank's progress sets them aside.
    time.sleep(0.5)


class _Selfish:
    """Gives this rank's experts its own tokens only, whatever experts those chose, without communication."""

    def __init__(self, real: Any):
        self._real = real

    def dispatch(self, x_TD: Tensor, probs_TK: Tensor, _experts_TK: Tensor) -> Dispatched:
        num_local = self._real.num_experts // self._real.group.size()
        counts = torch.zeros(num_local, dtype=torch.int64)
        counts[0] = x_TD.shape[0]
        return Dispatched(x_TD, probs_TK[:, 0], counts, None)

    def combine(self, rows_RD: Tensor, _handle: None) -> Tensor:
        return rows_RD


def _watch(directory: Path, *, timeout_s: float, abort: bool = False) -> HangWatch:
    return HangWatch(
        directory=directory,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout_s=timeout_s,
        abort=abort,
    )


def _batches(mesh: Any, spec: Spec, layout: Layout, step: int) -> list:
    return micro_batches(
        spec,
        step,
        data_rank=mesh.data_rank,
        num_data_ranks=mesh.num_data_ranks,
        accumulation=layout.accumulation,
    )


def _step(model: Any, optimizer: Any, mesh: Any, spec: Spec, layout: Layout, step: int) -> float:
    batches = _batches(mesh, spec, layout, step)
    counts = agree_on_counts(batches, mesh.world_group, copies=layout.tp)
    return train_step(model, optimizer, batches, counts, mesh=mesh, objective=OBJECTIVE, clip_norm=CLIP_NORM).loss
