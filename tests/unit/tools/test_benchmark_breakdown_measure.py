"""The breakdown of a real step on a CPU: gradients reach their parts, and the parts add up."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from moe_framework.distributed.mesh import build_mesh
from tests.helpers.one_rank import one_rank, tiny_config
from tools.benchmarks.breakdown import ranges
from tools.benchmarks.breakdown.attribute import UNATTRIBUTED, Attribution
from tools.benchmarks.breakdown.measure import Breakdown, Wait, measure_breakdown, summarise
from tools.benchmarks.breakdown.ranges import ranges_around_parts
from tools.benchmarks.breakdown.report import breakdown_markdown
from tools.benchmarks.breakdown.trace import parse_trace, read_trace
from tools.benchmarks.ceilings import Ceilings
from tools.benchmarks.train_step.contender import Contender
from tools.benchmarks.train_step.ours import build_ours

CPU = torch.device("cpu")
CEILINGS = Ceilings(256, bf16_flops=1e11, fp8_flops=None, copy_bytes=1e10, exchange_bytes=None)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def ours(folder: Path) -> Iterator[Contender]:
    config = tiny_config(folder)
    with one_rank():
        yield build_ours(config, build_mesh("cpu", dp=1, ep=1), CPU, seed=0)


@pytest.fixture(scope="module")
def found(ours: Contender, folder: Path) -> Breakdown:
    return measure_breakdown(ours.step, ours.profiled, tiny_config(folder), CPU, CEILINGS)


def test_every_part_has_time_and_with_the_idle_time_they_are_the_step(found: Breakdown):
    names = {part.name for part in found.parts}
    assert set(ranges.PARTS) - {ranges.EXCHANGE} <= names
    assert sum(part.seconds for part in found.parts) + found.idle_seconds == pytest.approx(found.step_seconds)
    assert sum(part.share for part in found.parts) == pytest.approx(1 - found.idle_seconds / found.step_seconds)
    assert sum(wait.seconds for wait in found.waits) == pytest.approx(found.idle_seconds)
    unattributed = sum(part.seconds for part in found.parts if part.name == UNATTRIBUTED)
    assert unattributed < 0.2 * found.step_seconds


def test_rates_and_floors_follow_from_work_and_ceilings(found: Breakdown):
    experts = next(part for part in found.parts if part.name == ranges.EXPERTS)
    assert experts.work is not None
    assert experts.rate == pytest.approx(experts.work.amount / experts.seconds)
    assert experts.floor_seconds == pytest.approx(experts.work.amount / CEILINGS.bf16_flops)
    optimizer = next(part for part in found.parts if part.name == ranges.OPTIMIZER)
    assert optimizer.work is not None
    assert optimizer.floor_seconds == pytest.approx(optimizer.work.amount / CEILINGS.copy_bytes)


def test_top_kernels_are_sorted_and_named(found: Breakdown):
    times = [kernel.seconds for kernel in found.top_kernels]
    assert times == sorted(times, reverse=True)
    assert any(kernel.name == "aten::mm" and kernel.part == ranges.ATTENTION for kernel in found.top_kernels)


def test_communication_is_hidden_where_computation_runs_beside_it():
    def span(category: str, name: str, start: float, end: float, thread: int, call: int | None = None) -> dict:
        times = {"ts": start, "dur": end - start}
        arguments = {} if call is None else {"correlation": call}
        return {"ph": "X", "cat": category, "name": name, "tid": thread, **times, "args": arguments}

    events = [
        span("user_annotation", ranges.STEP, 0, 1000, 1),
        span("user_annotation", "part:permutation", 10, 100, 1),
        span("cuda_runtime", "cudaLaunchKernel", 20, 21, 1, 1),
        span("cuda_runtime", "cudaLaunchKernel", 30, 31, 1, 2),
        span("user_annotation", "FSDP::all_gather", 110, 120, 1),
        span("cuda_runtime", "cudaLaunchKernel", 112, 113, 1, 3),
        span("cuda_runtime", "cudaLaunchKernel", 115, 116, 1, 4),
        span("kernel", "ncclDevKernel_SendRecv", 400, 500, 7, 1),
        span("kernel", "gather", 450, 475, 8, 2),
        span("kernel", "ncclDevKernel_AllGather", 600, 700, 7, 3),
        span("kernel", "copy", 700, 750, 7, 4),
    ]
    found = summarise(parse_trace(events), {}, CEILINGS)
    seconds = {part.part: (part.seconds, part.exposed_seconds) for part in found.communication}
    assert seconds == {
        ranges.EXCHANGE: (pytest.approx(100e-6), pytest.approx(75e-6)),
        ranges.SHARDING: (pytest.approx(100e-6), pytest.approx(100e-6)),
    }
    assert {part.name: part.seconds for part in found.parts}[ranges.SHARDING] == pytest.approx(150e-6)
    text = breakdown_markdown("ours:bf16", found, CEILINGS)
    assert "token exchange 0.10 ms, 25% hidden; FSDP copies and communication 0.10 ms, 0% hidden." in text


def test_on_a_cpu_nothing_is_said_of_communication(found: Breakdown):
    assert found.communication == []


def test_markdown_ends_its_table_with_the_idle_time_and_the_step(found: Breakdown):
    text = breakdown_markdown("ours:fp32", found, CEILINGS)
    names = [line.strip("| ").split(" | ")[0].strip() for line in text.splitlines() if line.startswith("|")]
    assert "nothing running" in names
    assert names.index("step, profiled") == names.index("nothing running") + 1
    assert "copy 0.01 TB/s" in text
    waits = [Wait("gemm", "experts", 2e-3), Wait("", "", 1e-3)]
    text = breakdown_markdown("ours:fp32", replace(found, waits=waits), CEILINGS)
    assert "Nothing ran, per step: 2.00 ms until gemm of experts; 1.00 ms until the end of the steps." in text


@pytest.fixture(scope="module")
def gradients(ours: Contender, folder: Path) -> dict[str, set[str]]:
    """The parts to which each kind of node of the backward pass was given, in one profiled step."""
    with (
        ranges_around_parts(ours.profiled),
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler,
        record_function(ranges.STEP),
    ):
        ours.step()
    profiler.export_chrome_trace(str(folder / "trace.json"))
    trace = read_trace(folder / "trace.json")
    attribution = Attribution(trace)
    parts: dict[str, set[str]] = {}
    for event in trace.host:
        if event.forward_thread:
            parts.setdefault(event.name.rpartition(" ")[2], set()).add(attribution.part_of(event))
    return parts


@pytest.mark.parametrize(
    ("node", "part"),
    [
        ("GroupedMmBackward0", ranges.EXPERTS),
        ("SiluBackward0", ranges.EXPERTS),
        ("ScaledDotProductFlashAttentionForCpuBackward0", ranges.ATTENTION),
        ("LogsumexpBackward0", ranges.ROUTER),
        ("_PermuteBackward", ranges.PERMUTATION),
        ("NllLossBackward0", ranges.HEAD),
        ("_LookupBackward", ranges.OTHER),
    ],
)
def test_a_node_of_the_backward_pass_is_given_to_its_part(gradients: dict[str, set[str]], node: str, part: str):
    assert gradients[node] == {part}


def test_the_ranges_leave_no_trace_on_the_model(ours: Contender):
    before = [(module, dict(module.__dict__)) for module in ours.profiled.modules()]
    with ranges_around_parts(ours.profiled):
        assert any(dict(module.__dict__) != attributes for module, attributes in before)
    assert all(dict(module.__dict__) == attributes for module, attributes in before)


def test_a_compiled_module_is_wrapped_outside_of_its_compiled_call(ours: Contender):
    attention = ours.profiled.layers[0].attention
    calls = []
    object.__setattr__(attention, "_compiled_call_impl", lambda *args: calls.append(args))
    try:
        with ranges_around_parts(ours.profiled), profile(activities=[ProfilerActivity.CPU], acc_events=True) as p:
            assert "forward" not in attention.__dict__
            attention(1)
    finally:
        object.__setattr__(attention, "_compiled_call_impl", None)
    assert calls == [(1,)]
    assert "part:attention" in {event.name for event in p.events() or ()}
