"""Loading a step: everything is checked first, then tensors are filled in place."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from moe_framework.checkpoint.manifest import RESTORE, Manifest, read_manifest
from moe_framework.checkpoint.ranks import Ranks, quiet_without_ranks
from moe_framework.checkpoint.reader import TensorLoadPlanner, TensorReader
from moe_framework.checkpoint.safe_pickle import METADATA_NAME, read_metadata
from moe_framework.checkpoint.verify import check_metadata, check_tensors, damaged_files
from moe_framework.errors import CheckpointError


def load_step(
    step_dir: Path,
    tensors: Mapping[str, Tensor],
    *,
    allow_extra: Callable[[str], bool] | None,
    ranks: Ranks,
) -> Manifest:
    """Fill tensors from a step; see `CheckpointStore.load`.

    Args:
        step_dir: The step's folder.
        tensors: The tensors to fill, by global name.
        allow_extra: Tells which names the step may have in excess; None for none.
        ranks: The store's ranks.

    Returns:
        The step's manifest.

    Raises:
        CheckpointError: The step is incomplete, damaged, unsafe or of another model; the same on every rank.

    Collective: the store's group; every rank must call.
    """
    manifest = ranks.together(lambda: _read_manifest_for(step_dir, tensors, allow_extra))
    _check_files(step_dir, manifest, ranks)
    metadata = ranks.together(lambda: _read_metadata_for(step_dir, manifest))
    with quiet_without_ranks():
        ranks.together(
            lambda: dcp_load(
                dict(tensors),
                storage_reader=TensorReader(step_dir, metadata),
                planner=TensorLoadPlanner(),
                process_group=ranks.group,
            )
        )
    return manifest


def _read_manifest_for(
    step_dir: Path, tensors: Mapping[str, Tensor], allow_extra: Callable[[str], bool] | None
) -> Manifest:
    manifest = read_manifest(step_dir)
    check_tensors(step_dir, manifest, tensors, allow_extra)
    return manifest


def _check_files(step_dir: Path, manifest: Manifest, ranks: Ranks) -> None:
    found = damaged_files(step_dir, manifest, rank=ranks.rank, num_ranks=ranks.size)
    problems = sorted(problem for part in ranks.gather(found) for problem in part)
    if METADATA_NAME not in manifest.files:
        problems.append(f"{step_dir / METADATA_NAME}: not in the manifest.")
    if problems:
        raise CheckpointError("\n".join(problems) + f" {RESTORE}")


def _read_metadata_for(step_dir: Path, manifest: Manifest) -> Metadata:
    metadata = read_metadata(step_dir)
    check_metadata(step_dir, manifest, metadata)
    return metadata
