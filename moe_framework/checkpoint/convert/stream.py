"""Moving tensors from a source to a sink, and comparing two sources, part by part in several threads."""

import hashlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from moe_framework.checkpoint.convert.base import Region, TensorInfo, TensorSink, TensorSource
from moe_framework.checkpoint.convert.boxes import bytes_of, parts

# Called from any thread with the number of bytes that are done.
OnBytes = Callable[[int], None]


class _StoppedError(Exception):
    """Another thread failed."""


def stream(source: TensorSource, sink: TensorSink, *, workers: int, on_bytes: OnBytes) -> dict[str, str]:
    """Write every tensor of a source to a sink.

    Args:
        source: Its names are the sink's.
        sink: After `begin`.
        workers: Threads; each holds a few parts of `boxes.PART_BYTES` at a time.
        on_bytes: Told of progress.

    Returns:
        Name → SHA-256 of the tensor's bytes, row-major and little-endian.

    Raises:
        CheckpointError: The source is damaged.
        OSError: The sink cannot be written.
    """
    infos = source.tensors()

    def copy(name: str, stop: threading.Event) -> str:
        digest = hashlib.sha256()
        for region in parts(infos[name]):
            _go_on(stop)
            part = source.read(name, region)
            digest.update(bytes_of(part))
            sink.write(name, tuple(box.start for box in region), part)
            on_bytes(part.nbytes)
        return digest.hexdigest()

    return _in_threads(copy, _largest_first(infos), workers)


def compare(
    one: TensorSource,
    other: TensorSource,
    infos: Mapping[str, TensorInfo],
    *,
    workers: int,
    on_bytes: OnBytes,
) -> dict[str, tuple[str, str]]:
    """Read tensors from two sources and hash them.

    Args:
        one: A source.
        other: Another with the same names; a tensor of `one` is cast to its dtype.
        infos: The tensors to compare. A shape may be smaller than the tensors': only that much of the beginning of
            each dim is compared.
        workers: Threads.
        on_bytes: Told of progress, in bytes of `other`.

    Returns:
        Name → both SHA-256.

    Raises:
        CheckpointError: A source is damaged.
    """

    def hash_both(name: str, stop: threading.Event) -> tuple[str, str]:
        left, right = hashlib.sha256(), hashlib.sha256()
        for region in parts(infos[name]):
            _go_on(stop)
            found = other.read(name, region)
            left.update(bytes_of(_cast(one.read(name, region), found.dtype)))
            right.update(bytes_of(found))
            on_bytes(found.nbytes)
        return left.hexdigest(), right.hexdigest()

    return _in_threads(hash_both, _largest_first(infos), workers)


def for_each_part(names: Mapping[str, TensorInfo], action: Callable[[str, Region], None], *, workers: int) -> None:
    """Call an action for every part of every tensor, in several threads; a tensor's parts come in order from one."""

    def run(name: str, stop: threading.Event) -> None:
        for region in parts(names[name]):
            _go_on(stop)
            action(name, region)

    _in_threads(run, _largest_first(names), workers)


def _cast(values: Tensor, dtype: torch.dtype) -> Tensor:
    return values if values.dtype == dtype else values.to(dtype)


def _go_on(stop: threading.Event) -> None:
    if stop.is_set():
        raise _StoppedError


def _largest_first(infos: Mapping[str, TensorInfo]) -> list[str]:
    """So that no thread begins the largest tensor when the others have nothing left to do."""
    return sorted(infos, key=lambda name: -infos[name].num_bytes)


def _in_threads[T](action: Callable[[str, threading.Event], T], names: list[str], workers: int) -> dict[str, T]:
    stop = threading.Event()
    with ThreadPoolExecutor(workers, thread_name_prefix="convert") as pool:
        futures = {name: pool.submit(action, name, stop) for name in names}
        try:
            done, _ = wait(futures.values(), return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {name: future.result() for name, future in futures.items()}
