"""The collectives that this process has begun, as torch's flight recorder keeps them.

The recorder and the table of process groups are private parts of torch (2.11); whatever uses them is here. The recorder
keeps nothing unless TORCH_FR_BUFFER_SIZE was set before the process group was made.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

# Gloo's collectives are in the first, NCCL's in the second.
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")


@dataclass(frozen=True)
class Group:
    """A process group that this rank is in.

    Attributes:
        name: The same on all of its ranks.
        description: Such as `mesh_ep`; `default_pg` is the world.
        ranks: Its members' global ranks.
    """

    name: str
    description: str
    ranks: list[int]


@dataclass(frozen=True)
class Collective:
    """A collective that this rank has begun.

    Attributes:
        backend: Such as `gloo`; each backend of a group counts for itself.
        group: Name of its group.
        number: Its number among the group's collectives, from 1; the same on all ranks that agree on what they do.
        kind: Such as `all_to_all`.
        input_sizes: Shape of each input.
        output_sizes: Shape of each output.
        dtypes: Of the inputs.
        begun_ns: `time.time_ns()` when it was begun.
        finished: Whether it has ended.
        thread: `threading.get_ident()` of the thread that began it.
    """

    backend: str
    group: str
    number: int
    kind: str
    input_sizes: list[list[int]]
    output_sizes: list[list[int]]
    dtypes: list[str]
    begun_ns: int
    finished: bool
    thread: int

    def describe(self) -> str:
        """Return its number, kind, type and sizes."""
        sizes = _sizes(self.input_sizes)
        if self.output_sizes != self.input_sizes:
            sizes += f" → {_sizes(self.output_sizes)}"
        return f"#{self.number} {self.kind} {'+'.join(sorted(set(self.dtypes)))} {sizes}".rstrip()

    def signature(self) -> tuple[Any, ...]:
        """Return what the ranks of a group must agree on: of an exchange of rows, all but the numbers of rows."""
        sizes = [size[1:] for size in self.input_sizes] if "all_to_all" in self.kind else self.input_sizes
        if any(word in self.kind for word in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")):
            return self.kind, tuple(self.dtypes), tuple(map(tuple, sizes))
        return (self.kind,)  # from or to one rank: its tensors differ from the others'


def recorded() -> tuple[list[Collective], str]:
    """Return the last collectives of this process, the oldest first, and why there are none if so."""
    module = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
    dumps = [dump for name in _RECORDERS if (dump := getattr(module, name, None)) is not None]
    if not dumps:
        return [], f"collectives unknown: torch {torch.__version__} has no flight recorder as JSON"
    entries: list[dict] = []
    try:
        for dump in dumps:
            entries += json.loads(dump(True, False)).get("entries", [])
        # Sends between two ranks have numbers of their own; nothing here uses them.
        found = [_collective(entry) for entry in entries if not entry.get("is_p2p")]
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        return [], f"collectives unknown: flight recorder of torch {torch.__version__}: {type(error).__name__}: {error}"
    if not found:
        return [], "no collectives recorded: TORCH_FR_BUFFER_SIZE was not set before the process group was made"
    return sorted(found, key=lambda one: one.begun_ns), ""


def process_groups() -> list[Group]:
    """Return the process groups of this rank; none where torch does not tell."""
    world = getattr(dist.distributed_c10d, "_world", None)
    names: Iterable[tuple[Any, str]] = getattr(world, "pg_names", {}).items() if dist.is_initialized() else ()
    return [
        Group(name, getattr(group, "group_desc", "") or name, dist.get_process_group_ranks(group))
        for group, name in list(names)
    ]


def is_of_collectives(error: BaseException | None) -> bool:
    """Return whether an error is one of gloo's or NCCL's: another rank has gone, or began another collective."""
    # Gloo's are plain RuntimeErrors, which name its source file.
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _collective(entry: dict) -> Collective:
    backend, _, kind = entry["profiling_name"].rpartition(":")
    return Collective(
        backend=backend,
        group=entry["process_group"][0],
        number=entry["collective_seq_id"],
        kind=kind,
        input_sizes=entry.get("input_sizes", []),
        output_sizes=entry.get("output_sizes", []),
        dtypes=entry.get("input_dtypes", []),
        begun_ns=entry["time_created_ns"],
        finished=bool(entry["retired"]) or entry["state"] == "completed",
        thread=int(entry.get("thread_id", 0)),
    )


def _sizes(sizes: list[list[int]]) -> str:
    if len(sizes) > 2:
        return f"{len(sizes)} tensors"
    return " ".join("[" + ", ".join(map(str, size)) + "]" for size in sizes)
