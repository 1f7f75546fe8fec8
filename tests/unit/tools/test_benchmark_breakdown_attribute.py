"""Whose time it is: kernels and operations are given to parts, and the parts add up to the step."""

import itertools

import pytest

from tools.benchmarks.breakdown import ranges
from tools.benchmarks.breakdown.attribute import END, UNATTRIBUTED, Piece, device_pieces, host_pieces, share_out
from tools.benchmarks.breakdown.trace import parse_trace

MAIN, ENGINE = 100, 200


class Events:
    """Writes the events of a Chrome trace as the profiler does, inside a step of 1,000 μs on the main thread."""

    def __init__(self):
        self._correlations = itertools.count(1)
        self.all: list[dict] = []
        self.span(ranges.STEP, 0, 1000, category="user_annotation")

    def span(
        self,
        name: str,
        start: float,
        end: float,
        thread: int = MAIN,
        category: str = "cpu_op",
        args: dict | None = None,
    ) -> None:
        times = {"ts": start, "dur": end - start}
        self.all.append({"ph": "X", "cat": category, "name": name, "tid": thread, **times, "args": args or {}})

    def part(self, name: str, start: float, end: float, thread: int = MAIN) -> None:
        self.span(name, start, end, thread, "user_annotation")

    def operation(self, name: str, start: float, end: float, sequence: int, thread: int = MAIN) -> None:
        self.span(name, start, end, thread, args={"Sequence number": sequence, "Fwd thread id": 0})

    def node(self, name: str, start: float, end: float, sequence: int, made_by: int = 1) -> None:
        self.span(name, start, end, ENGINE, args={"Sequence number": sequence, "Fwd thread id": made_by})

    def launch(self, name: str, at: float, start: float, end: float, *, thread: int = MAIN) -> None:
        correlation = next(self._correlations)
        self.span("cudaLaunchKernel", at, at + 1, thread, "cuda_runtime", {"correlation": correlation})
        self.span(name, start, end, 7, "kernel", {"correlation": correlation})

    def parts(self) -> dict[str, str]:
        return {piece.name: piece.part for piece in device_pieces(parse_trace(self.all))}


def test_a_kernel_belongs_to_the_innermost_range_around_its_launch():
    events = Events()
    events.part("part:permutation", 10, 100)
    events.part("part:experts", 20, 60)
    events.launch("gemm", 30, 500, 600)
    events.launch("gather", 70, 600, 700)
    assert events.parts() == {"gemm": "experts", "gather": "permutation"}


def test_a_gradient_belongs_to_the_range_of_what_it_is_the_gradient_of():
    events = Events()
    events.part("part:experts", 10, 50)
    events.operation("aten::mm", 20, 30, sequence=5)
    events.part("part:attention", 60, 90)
    events.operation("aten::mm", 70, 80, sequence=6)
    events.node("autograd::engine::evaluate_function: MmBackward0", 300, 320, sequence=6)
    events.launch("attention gradient", 305, 600, 610, thread=ENGINE)
    events.node("autograd::engine::evaluate_function: MmBackward0", 330, 350, sequence=5)
    events.launch("experts gradient", 340, 610, 620, thread=ENGINE)
    assert events.parts() == {"attention gradient": "attention", "experts gradient": "experts"}


def test_of_operations_with_one_sequence_number_the_last_made_the_node():
    events = Events()
    events.part("part:attention", 10, 20)
    events.operation("aten::empty", 12, 14, sequence=5)  # no node: the number stays for the next
    events.part("part:experts", 30, 50)
    events.operation("aten::mm", 32, 34, sequence=5)
    events.node("MmBackward0", 300, 320, sequence=5)
    events.launch("gradient", 305, 600, 610, thread=ENGINE)
    assert events.parts() == {"gradient": "experts"}


def test_a_recomputed_operation_and_its_gradient_belong_to_the_range_that_is_run_again():
    events = Events()
    events.part("part:attention", 10, 40)
    events.operation("aten::mm", 12, 14, sequence=0)
    events.operation("checkpointed", 20, 30, sequence=1)
    # In backward, on the engine's thread, with sequence numbers of that thread.
    events.node("checkpointed", 300, 400, sequence=1)
    events.part("part:experts", 310, 390, thread=ENGINE)
    events.operation("aten::mm", 320, 330, sequence=0, thread=ENGINE)
    events.launch("recomputed", 325, 600, 610, thread=ENGINE)
    events.node("MmBackward0", 410, 420, sequence=0, made_by=2)
    events.launch("gradient", 415, 610, 620, thread=ENGINE)
    assert events.parts() == {"recomputed": "experts", "gradient": "experts"}


def test_what_fsdp_launches_inside_a_range_is_fsdps():
    events = Events()
    events.part("part:permutation", 10, 100)
    events.part("FSDP::all_gather", 20, 40)
    events.launch("cast", 30, 500, 510)
    assert events.parts() == {"cast": ranges.SHARDING}


def test_communication_is_the_token_exchange_inside_a_moe_layer_and_fsdps_elsewhere():
    events = Events()
    events.part("part:permutation", 10, 100)
    events.launch("ncclDevKernel_SendRecv", 30, 500, 510)
    events.part("part:attention", 110, 200)
    events.launch("ncclDevKernel_AllGather", 130, 510, 520)
    assert events.parts() == {
        "ncclDevKernel_SendRecv": ranges.EXCHANGE,
        "ncclDevKernel_AllGather": ranges.SHARDING,
    }


def test_what_follows_the_backward_pass_is_the_optimizers():
    events = Events()
    events.launch("counts", 5, 400, 410)
    events.part("part:experts", 10, 50)
    events.operation("aten::mm", 20, 30, sequence=5)
    events.node("MmBackward0", 300, 320, sequence=5)
    events.launch("norm", 330, 600, 610)
    events.part("Optimizer.step#AdamW.step", 340, 400)
    events.launch("adamw", 350, 610, 620)
    assert events.parts() == {"counts": UNATTRIBUTED, "norm": ranges.OPTIMIZER, "adamw": ranges.OPTIMIZER}


def test_a_kernel_whose_launch_is_not_in_the_trace_is_unattributed():
    events = Events()
    events.span("stray", 500, 510, 7, "kernel", {"correlation": 99})
    assert events.parts() == {"stray": UNATTRIBUTED}


def test_on_a_cpu_the_own_time_of_operations_counts_without_their_children():
    events = Events()
    events.part("part:experts", 10, 100)
    events.operation("aten::linear", 20, 80, sequence=5)
    events.operation("aten::mm", 30, 60, sequence=5)
    pieces = host_pieces(parse_trace(events.all))
    assert sorted((p.name, p.end - p.start, p.calls) for p in pieces) == [
        ("aten::linear", 10, 1),
        ("aten::linear", 20, 0),
        ("aten::mm", 30, 1),
    ]
    assert {p.part for p in pieces} == {"experts"}


def piece(start: float, end: float, part: str, *, communicates: bool = False) -> Piece:
    return Piece(start, end, part, "kernel", communicates)


@pytest.mark.parametrize(
    ("pieces", "parts", "idle"),
    [
        ([piece(10, 30, "a"), piece(40, 50, "b")], {"a": 20, "b": 10}, 70),
        ([piece(10, 30, "a"), piece(20, 50, "b")], {"a": 20, "b": 20}, 60),
        # Communication counts only where nothing computes.
        ([piece(0, 60, "c", communicates=True), piece(20, 30, "a")], {"c": 50, "a": 10}, 40),
        ([piece(10, 90, "a"), piece(20, 30, "b"), piece(95, 300, "b")], {"a": 80, "b": 5}, 15),
        ([piece(-20, 10, "a")], {"a": 10}, 90),
        ([], {}, 100),
    ],
)
def test_every_moment_is_given_once(pieces: list[Piece], parts: dict[str, float], idle: float):
    found, nothing = share_out(pieces, 0, 100)
    assert {whose.part: time for whose, time in found.items()} == parts
    assert {whose.part for whose in found if whose.is_communication} == {"c"} & parts.keys()
    assert sum(nothing.values()) == idle
    assert sum(found.values()) + sum(nothing.values()) == 100


def test_idle_time_is_known_by_what_came_next():
    pieces = [piece(10, 30, "a"), piece(40, 50, "b"), piece(45, 60, "a"), piece(90, 95, "b")]
    _, idle = share_out(pieces, 0, 100)
    assert idle == {("a", "kernel"): 10, ("b", "kernel"): 10 + 30, END: 5}
