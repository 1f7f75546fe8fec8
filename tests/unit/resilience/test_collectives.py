"""What torch's flight recorder tells; that it records is tested by the reports of tests/distributed/."""

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from moe_framework.resilience import collectives
from moe_framework.resilience.collectives import is_of_collectives, process_groups, recorded
from tests.helpers.one_rank import one_rank
from tests.unit.resilience.reports import WORLD4, collective

RECORDER: Any = torch._C._distributed_c10d  # pyright: ignore


def _entry(number: int, name: str = "gloo:all_to_all", **changes: Any) -> dict:
    return {
        "process_group": ["0", "default_pg"],
        "collective_seq_id": number,
        "profiling_name": name,
        "input_sizes": [[2, 4]],
        "output_sizes": [[2, 4]],
        "input_dtypes": ["Long"],
        "time_created_ns": 1000 + number,
        "retired": False,
        "state": "scheduled",
        "thread_id": "77",
        "is_p2p": False,
    } | changes


def _records(monkeypatch: pytest.MonkeyPatch, gloo: list[dict], nccl: list[dict]) -> None:
    for name, entries in (("_dump_fr_trace_json", gloo), ("_dump_nccl_trace_json", nccl)):
        dump = json.dumps({"entries": entries} if entries else {"version": "2.10"}).encode()
        monkeypatch.setattr(RECORDER, name, lambda *_, dump=dump: dump)


def test_entries_of_both_recorders_are_read_in_order(monkeypatch: pytest.MonkeyPatch):
    nccl = _entry(1, "nccl:_all_gather_base", state="completed", time_created_ns=5)
    _records(monkeypatch, [_entry(2), _entry(1, retired=True), _entry(9, is_p2p=True)], [nccl])
    found, note = recorded()
    assert note == ""
    assert [(one.backend, one.kind, one.number, one.finished) for one in found] == [
        ("nccl", "_all_gather_base", 1, True),
        ("gloo", "all_to_all", 1, True),
        ("gloo", "all_to_all", 2, False),
    ]
    assert found[2].describe() == "#2 all_to_all Long [2, 4]"
    assert (found[2].group, found[2].thread, found[2].begun_ns) == ("0", 77, 1002)


def test_an_empty_recorder_says_what_to_set(monkeypatch: pytest.MonkeyPatch):
    _records(monkeypatch, [], [])
    assert recorded() == (
        [],
        "no collectives recorded: TORCH_FR_BUFFER_SIZE was not set before the process group was made",
    )


def test_another_form_of_entries_is_said_and_not_raised(monkeypatch: pytest.MonkeyPatch):
    _records(monkeypatch, [{"other": 1}], [])
    found, note = recorded()
    assert found == []
    assert note.startswith(f"collectives unknown: flight recorder of torch {torch.__version__}: KeyError")


def test_a_torch_without_the_recorder_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(collectives, "_RECORDERS", ("_no_such_function",))
    assert "has no flight recorder" in recorded()[1]


def test_the_groups_of_the_process_are_known():
    assert process_groups() == []
    with one_rank():
        (world, second) = process_groups()
        assert (world.description, world.ranks) == ("default_pg", [0])
        assert second.ranks == [0]


def test_sizes_and_types_belong_to_what_ranks_must_agree_on():
    def signature(kind: str, sizes: tuple, dtype: str = "Float") -> tuple:
        return collective(0, WORLD4, 1, kind, False, sizes, dtype).signature()

    assert signature("all_to_all", (3, 8)) == signature("all_to_all", (5, 8))
    assert signature("all_to_all", (3, 8)) != signature("all_to_all", (3, 16))
    assert signature("all_to_all", (3, 8)) != signature("all_to_all", (3, 8), "Long")
    assert signature("all_reduce", (3,)) != signature("all_reduce", (5,))
    assert signature("all_reduce", (3,)) != signature("all_gather", (3,))
    # Only the root of a broadcast or gather knows all of its sizes.
    assert signature("gather", (3,)) == signature("gather", (5,))


def test_errors_of_collectives_are_told_from_others():
    assert is_of_collectives(dist.DistBackendError("NCCL error"))
    assert is_of_collectives(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:538] Read error"))
    assert not is_of_collectives(RuntimeError("out of memory"))
    assert not is_of_collectives(ValueError("gloo"))
    assert not is_of_collectives(None)
