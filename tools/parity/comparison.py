"""One layout's ranks against the reference: what is gathered, compared, and handed to the report."""

import logging
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from tools.parity.faults import FAULTS
from tools.parity.plan import Case, Options
from tools.parity.probe import GateProbe, probe_gate
from tools.parity.progress import Steps
from tools.parity.reference import TENSORS, read_reference
from tools.parity.rounding import round_weights
from tools.parity.routing import Differences, Replayer
from tools.parity.tensors import (
    MOMENTS,
    Difference,
    compare_all,
    digests,
    moments,
    named_parameters,
    replica_digests,
    unequal_replicas,
)
from tools.parity.tolerances import NUM_MOVES
from tools.parity.training import Figures, Run, build, train


@dataclass(frozen=True)
class Findings:
    """What was found about one layout.

    Attributes:
        figures: Of each rank.
        differences: By kind of tensor (`reference.TENSORS`) and name, in the model's order.
        initial: Names whose first values differ from the reference's; `NAME swapped` where they are the reference's
            with gate and up exchanged.
        routing: Choices that would have differed.
        unequal_replicas: Names, with their kind, of which ranks hold different copies.
        num_copies: Copies that were compared.
        gate: The experts' function, on the rank where it is farthest off.
    """

    figures: list[Figures]
    differences: dict[str, dict[str, Difference]]
    initial: list[str]
    routing: Differences
    unequal_replicas: list[str]
    num_copies: int
    gate: GateProbe


def run_cases(
    group: dist.ProcessGroup,
    device: torch.device,
    cases: list[tuple[int, Case]],
    options: Options,
    folder: Path,
    steps: Steps,
) -> None:
    """Run layouts of one number of ranks, and write each one's findings as soon as it is done.

    Args:
        group: The world.
        device: This rank's.
        cases: With their numbers, which name their files.
        options: From the command line.
        folder: The references' folders are in it; the findings are written there.
        steps: Counts the steps for the progress lines, on rank 0.

    Collective: the world; every rank must call.
    """
    # Said once per rank for the shards of a shard that tp and FSDP make, which are gathered one axis after the other.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    for number, case in cases:
        fault = FAULTS[options.inject].during(case.layout) if options.inject else nullcontext()
        with fault:
            findings = _compare(case, options, device, folder / case.reference, steps)
        if group.rank() == 0:
            findings_path(folder, number).write_bytes(pickle.dumps(findings))


def run_exact(
    group: dist.ProcessGroup, device: torch.device, case: Case, options: Options, folder: Path, steps: Steps
) -> None:
    """Run the reference in fp32, to measure what its own precision's rounding does, and write the findings.

    Args:
        group: Of one rank.
        device: Its device.
        case: From `plan.exact_case`.
        options: From the command line; no fault is made.
        folder: The reference's folder is in it; the findings are written there.
        steps: Counts the steps for the progress lines.
    """
    assert group.size() == 1, "the reference is one rank"
    findings = _compare(case, replace(options, inject=None), device, folder / case.reference, steps)
    exact_path(folder, case.reference).write_bytes(pickle.dumps(findings))


def run_moved(
    group: dist.ProcessGroup, device: torch.device, case: Case, options: Options, folder: Path, steps: Steps
) -> None:
    """Run the reference NUM_MOVES times, its first weights moved by their last place, and write the findings.

    Args:
        group: Of one rank.
        device: Its device.
        case: From `plan.moved_case`.
        options: From the command line; no fault is made.
        folder: The reference's folder is in it; the findings are written there.
        steps: Counts the steps for the progress lines.
    """
    assert group.size() == 1, "the reference is one rank"
    options, reference = replace(options, inject=None), folder / case.reference
    findings = [_compare(case, options, device, reference, steps, moved_by=seed) for seed in range(NUM_MOVES)]
    moved_path(folder, case.reference).write_bytes(pickle.dumps(findings))


def moved_path(folder: Path, reference: str) -> Path:
    """Return the file of the findings of a reference with moved weights."""
    return folder / f"moved {reference}.pickle"


def exact_path(folder: Path, reference: str) -> Path:
    """Return the file of the findings of a reference in fp32."""
    return folder / f"exact {reference}.pickle"


def findings_path(folder: Path, number: int) -> Path:
    """Return the file of a case's findings."""
    return folder / f"findings_{number}.pickle"


def _compare(
    case: Case, options: Options, device: torch.device, folder: Path, steps: Steps, *, moved_by: int | None = None
) -> Findings:
    reference = read_reference(folder)
    run = build(case.config, device, reference.experts_backend)
    if moved_by is not None:
        round_weights(run.model, moved_by)
    initial = digests(named_parameters(run.model))
    replayer = Replayer(run.model, run.mesh.tp.get_local_rank(), reference.routing)
    differences: dict[str, dict[str, Difference]] = {}

    def compare_gradients(gradients: Iterator[tuple[str, Tensor]]) -> None:
        differences["gradients"] = compare_all(gradients, reference.tensors("gradients"))

    def advance(_step: int) -> None:
        if options.inject:
            FAULTS[options.inject].after_step(run)
        if dist.get_rank() == 0:
            steps.advance(case.name)

    figures = train(run, options, begin=replayer.begin, at_gradients=compare_gradients, advance=advance)
    differences["parameters"] = compare_all(named_parameters(run.model), reference.tensors("parameters"))
    for key in MOMENTS:
        differences[key] = compare_all(moments(run.model, run.optimizer, key), reference.tensors(key))
    gate = probe_gate(run)
    routing = Differences()
    for other in _of_all_ranks(replayer.found):
        routing.add(other)
    unequal, num_copies = unequal_replicas(_of_all_ranks(replica_digests(_state(run))))
    return Findings(
        figures=_of_all_ranks(figures),
        differences={kind: differences.get(kind, {}) for kind in TENSORS},
        initial=_changed(initial, reference.initial),
        routing=routing,
        unequal_replicas=unequal,
        num_copies=num_copies,
        gate=max(_of_all_ranks(gate), key=lambda of_rank: of_rank.stored),
    )


def _state(run: Run) -> Iterator[tuple[str, Tensor]]:
    kinds = (moments(run.model, run.optimizer, key) for key in MOMENTS)
    yield from chain(
        named_parameters(run.model), *(_prefixed(key, kind) for key, kind in zip(MOMENTS, kinds, strict=True))
    )


def _prefixed(kind: str, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((f"{kind} of {name}", tensor) for name, tensor in tensors)


def _of_all_ranks[T](value: T) -> list[T]:
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return cast(list[T], values)


def _changed(initial: dict[str, str], expected: dict[str, str]) -> list[str]:
    """Names whose digests differ; where gate and up are exchanged, only that name is given."""
    plain = [name for name in (initial | expected) if not name.endswith(" swapped")]
    changed = [name for name in plain if initial.get(name) != expected.get(name)]
    return [
        f"{name} swapped"
        if initial.get(name) is not None and initial.get(name) == expected.get(f"{name} swapped")
        else name
        for name in changed
    ]
