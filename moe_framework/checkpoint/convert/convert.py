"""Carrying a plan out: stream, publish, verify, report."""

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moe_framework.checkpoint.convert.base import TensorInfo, TensorSink
from moe_framework.checkpoint.convert.check import check_tensors
from moe_framework.checkpoint.convert.dcp_chunks import DEFAULT_FILE_BYTES
from moe_framework.checkpoint.convert.dcp_sink import DcpSink
from moe_framework.checkpoint.convert.dcp_source import DcpSource
from moe_framework.checkpoint.convert.formats import DCP, HF, open_checkpoint
from moe_framework.checkpoint.convert.hf_sink import HfSink
from moe_framework.checkpoint.convert.hf_source import companions_of
from moe_framework.checkpoint.convert.megatron_sink import MegatronSink
from moe_framework.checkpoint.convert.plan import Plan
from moe_framework.checkpoint.convert.publish import check_free, check_space, publishing
from moe_framework.checkpoint.convert.stream import OnBytes, compare, stream
from moe_framework.checkpoint.convert.views import OurView, SelectedView, TheirView
from moe_framework.checkpoint.manifest import replace_durably
from moe_framework.checkpoint.staging import dtype_name
from moe_framework.errors import CheckpointError

# Of our sizes, those that `model.*` of the configuration has.
_MODEL_KEYS = (
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "top_k",
    "vocab_size",
    "max_positions",
    "rope_theta",
    "norm_eps",
    "tie_embeddings",
    "qk_norm",
)
# What a run would resume from; wrong for weights alone.
_RUN_STATE = ("position", "optimizer_step")


def check_target(plan: Plan) -> None:
    """Check that the target can be written.

    Args:
        plan: The plan.

    Raises:
        CheckpointError: The target exists, or the disk is too full.
    """
    check_free(plan.request.target)
    check_space(plan.request.target, plan.num_bytes)


def convert(
    plan: Plan, *, workers: int, on_bytes: OnBytes, before_publishing: Callable[[Path], None] | None = None
) -> dict[str, str]:
    """Write the target; it appears when it is complete.

    Args:
        plan: The plan.
        workers: Threads.
        on_bytes: Told of progress, in bytes of the target.
        before_publishing: Called with the complete folder while it still has another name, such as to verify it;
            the target does not appear if it raises.

    Returns:
        Name of each tensor of the target → SHA-256 of its bytes.

    Raises:
        CheckpointError: The source is damaged, or the target cannot be written; nothing is left of it.
    """
    check_target(plan)
    if isinstance(plan.source, DcpSource):
        plan.source.check_files()
    try:
        with publishing(plan.request.target) as folder:
            sink = _make_sink(plan, folder)
            try:
                sink.begin(plan.tensors.tensors(), plan.sizes)
                checksums = stream(plan.tensors, sink, workers=workers, on_bytes=on_bytes)
                sink.finish()
            except BaseException:
                sink.abort()
                raise
            if before_publishing is not None:
                before_publishing(folder)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "Free some space" if full else "Mend that"
        raise CheckpointError(
            f"{plan.request.target}: not written: {error.strerror or error}. {remedy}, and start again; nothing of it "
            "was left behind."
        ) from error
    return checksums


def verify(plan: Plan, folder: Path, *, workers: int, on_bytes: OnBytes) -> dict[str, str]:
    """Read a result back, and compare every tensor of the source with what the inverse of the key map makes of it.

    Args:
        plan: The plan, carried out.
        folder: The result.
        workers: Threads.
        on_bytes: Told of progress, in bytes of the source's tensors in the target's dtype.

    Returns:
        Name of each tensor of the source → SHA-256 of its bytes, the same on both sides; padding of the vocabulary
        is left out.

    Raises:
        CheckpointError: Tensors differ, or the target is damaged; the message has all of them.
    """
    target = str(plan.request.target)
    _drop_cached(folder)
    result, _ = open_checkpoint(folder, plan.request.target_format, sizes=plan.sizes)
    try:
        if isinstance(result, DcpSource):
            result.check_files()
        check_tensors(result, plan.target_map, target)
        inverse = TheirView(OurView(result, plan.target_map), plan.source_map)
        infos = compared_tensors(plan)
        found = compare(plan.source, inverse, infos, workers=workers, on_bytes=on_bytes)
        if plan.optimizer:
            moments = SelectedView(result, {name: name for name in plan.optimizer})
            found |= compare(plan.source, moments, moments.tensors(), workers=workers, on_bytes=on_bytes)
    finally:
        result.close()
    wrong = sorted(name for name, (source, back) in found.items() if source != back)
    if wrong:
        lines = "\n".join(
            f"{target}: '{name}' does not come back: SHA-256 {found[name][0][:16]}… in the source, "
            f"{found[name][1][:16]}… from the target."
            for name in wrong
        )
        raise CheckpointError(f"{lines} The result is damaged; convert again.")
    return {name: source for name, (source, _) in found.items()}


def compared_tensors(plan: Plan) -> dict[str, TensorInfo]:
    """The source's tensors as far as they are converted: without the padding of the vocabulary.

    Args:
        plan: The plan.

    Returns:
        Name → shape of what is compared, and dtype of the target.
    """
    tensors = plan.tensors.tensors()
    dtypes = {link.ours: tensors[name].dtype for name, links in plan.target_map.by_theirs.items() for link in links}
    infos = {}
    for name, links in plan.source_map.by_theirs.items():
        ends = zip(*((box.stop for box in link.theirs_region) for link in links), strict=True)
        infos[name] = TensorInfo(tuple(max(end) for end in ends), dtypes[links[0].ours])
    return infos


def write_report(path: Path, plan: Plan, checksums: dict[str, str], verified: dict[str, str] | None) -> None:
    """Write what was converted into a JSON file.

    Args:
        path: The file.
        plan: The plan.
        checksums: From `convert`.
        verified: From `verify`; None if the result was not read back.

    Raises:
        CheckpointError: The file cannot be written; the target is complete all the same.
    """
    report = {
        "source": str(plan.request.source),
        "source_format": plan.source_format,
        "target": str(plan.request.target),
        "target_format": plan.request.target_format,
        "tensors": describe(plan, checksums),
        "not_converted": list(plan.left_out),
        "verified": None if verified is None else dict(sorted(verified.items())),
    }
    try:
        replace_durably(path, json.dumps(report, indent=1) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"{path}: the report cannot be written ({error.strerror}). {plan.request.target} is complete."
        ) from error


def describe(plan: Plan, checksums: dict[str, str]) -> list[dict[str, Any]]:
    """One entry for each tensor of the target: name, sources, shape, dtype and, if known, SHA-256."""
    return [
        {
            "name": name,
            "sources": plan.sources_of(name),
            "shape": list(info.shape),
            "dtype": dtype_name(info.dtype),
            "sha256": checksums.get(name),
        }
        for name, info in plan.tensors.tensors().items()
    ]


def _drop_cached(folder: Path) -> None:
    """Let what is read come from the disk, not from what the system still has in memory of the writing."""
    for path in folder.iterdir():
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _make_sink(plan: Plan, folder: Path) -> TensorSink:
    request = plan.request
    companions = plan.source.companions if request.like is None else companions_of(request.like)
    max_file_bytes = request.max_shard_bytes or DEFAULT_FILE_BYTES
    if request.target_format == HF:
        return HfSink(folder, companions=companions, max_shard_bytes=request.max_shard_bytes)
    if request.target_format != DCP:
        return MegatronSink(folder, max_file_bytes=max_file_bytes)
    if not isinstance(plan.source, DcpSource):
        state = {"config": {"model": _known(plan.sizes, _MODEL_KEYS)}, "conversion": _origin(plan)}
        return DcpSink(folder, state=state, companions=companions, max_file_bytes=max_file_bytes)
    manifest = plan.source.manifest
    state = dict(manifest.state)
    if not plan.optimizer:
        state = {key: value for key, value in state.items() if key not in _RUN_STATE} | {"conversion": _origin(plan)}
    return DcpSink(
        folder,
        state=state,
        step=manifest.step,
        companions=companions,
        rank_states=manifest.rank_states if plan.optimizer else [],
        max_file_bytes=max_file_bytes,
    )


def _origin(plan: Plan) -> dict[str, Any]:
    return {"source_format": plan.source_format, "sizes": plan.sizes}


def _known(sizes: dict[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    return {key: sizes[key] for key in keys if key in sizes}
