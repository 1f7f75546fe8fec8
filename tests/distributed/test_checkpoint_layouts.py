"""A checkpoint does not depend on the layout that wrote it: content, names, shapes and size."""

from pathlib import Path

import pytest
from torch import Tensor

from moe_framework.checkpoint import read_manifest
from tests.distributed import checkpoint_layout_jobs as jobs
from tests.distributed.parity_jobs import Layout, Spec, idle_one_expert
from tests.helpers.pool import RankPool
from tests.unit.model.builders import plain_decoder

SPEC = Spec(seed=11)
# Large enough for the headers of its blocks to be less than a percent of the file.
LARGE = Spec(seed=11, changes=(("hidden_size", 128), ("intermediate_size", 384)))
SOURCE = Layout(2, 2)
OTHERS = [
    Layout(1, 2, tp=2),
    Layout(2, 1, tp=2, expert_tp=2, backend="loop"),
]
MORE = [
    Layout(1, 1, tp=4),
    Layout(4, 1),
    Layout(2, 1, tp=2, dp_replicate=2),
    Layout(1, 2, tp=2, expert_tp=2, backend="loop"),
    Layout(1, 1, tp=4, expert_tp=4, backend="loop"),
    Layout(2, 2, dp_replicate=2),
]


@pytest.fixture(scope="module")
def expected() -> dict[str, Tensor]:
    """What a checkpoint has to hold, from the model on one process."""
    model = plain_decoder(SPEC.sizes, seed=SPEC.seed)
    idle_one_expert(model)
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters():
        moments = jobs.moments_like(parameter.detach())
        tensors |= {f"optimizer.{key}.{name}": moment for key, moment in moments.items()}
    return tensors


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    ranks.run(jobs.save_at, SOURCE.world_size, directory, SPEC, SOURCE)
    return directory


def size_of(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    "layout", [*OTHERS, *(pytest.param(layout, marks=pytest.mark.slow) for layout in MORE)], ids=str
)
def test_a_step_goes_to_another_layout_and_back_bit_for_bit(
    ranks: RankPool, saved: Path, tmp_path: Path, layout: Layout, expected: dict[str, Tensor]
):
    assert ranks.run(jobs.load_at, layout.world_size, saved, SPEC, layout, expected) == [[]] * layout.world_size
    ranks.run(jobs.save_at, layout.world_size, tmp_path, SPEC, layout)
    assert ranks.run(jobs.load_at, SOURCE.world_size, tmp_path, SPEC, SOURCE, expected) == [[]] * SOURCE.world_size

    there, here = (read_manifest(directory / "step_00000001") for directory in (saved, tmp_path))
    assert here.tensors == there.tensors
    assert {name: entry.shape for name, entry in here.tensors.items()} == {
        n: tuple(t.shape) for n, t in expected.items()
    }


def test_the_size_of_a_step_does_not_depend_on_the_layout(ranks: RankPool, tmp_path: Path):
    sizes = {}
    for layout in (SOURCE, Layout(1, 1, tp=4, expert_tp=4, backend="loop"), Layout(2, 1, tp=2, dp_replicate=2)):
        directory = tmp_path / str(layout)
        ranks.run(jobs.save_at, layout.world_size, directory, LARGE, layout)
        sizes[str(layout)] = size_of(directory)
    assert max(sizes.values()) == pytest.approx(min(sizes.values()), rel=0.01), sizes


@pytest.mark.parametrize("layout", [*OTHERS, *MORE], ids=str)
def test_every_block_is_stored_where_it_belongs(ranks: RankPool, layout: Layout):
    assert ranks.run(jobs.places_of_values, layout.world_size, SPEC, layout) == [[]] * layout.world_size
