import json
import logging
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe_framework.checkpoint.state import optimizer_step
from moe_framework.config.schema import Config
from moe_framework.distributed.runtime import Runtime
from moe_framework.errors import CheckpointError, ConfigError
from moe_framework.train.build import Training, build_training, checkpoint_dir, run_dir
from moe_framework.train.persist import Position, resume, save
from tests.helpers.one_rank import one_rank, tiny_config
from tests.unit.checkpoint.steps import edit_manifest

POSITION = Position(step=3, consumed_samples=12)


@pytest.fixture(scope="module")
def runtime() -> Iterator[Runtime]:
    with one_rank() as started:
        yield started


@pytest.fixture(scope="module")
def saved(runtime: Runtime, tmp_path_factory) -> tuple[Path, Config, Training]:
    """A run's folder, configuration and objects, with one save."""
    folder = tmp_path_factory.mktemp("saved")
    config = tiny_config(folder, "checkpoint.async_save=false")
    training = build_training(config, runtime)
    with torch.no_grad():
        for parameter in training.model.parameters():
            parameter.mul_(1.5)
    random.seed(11)
    save(training, POSITION)
    return folder, config, training


def changed(config: Config, section: str, **values: object) -> Config:
    return replace(config, **{section: replace(getattr(config, section), **values)})


def test_resume_gives_back_position_weights_and_random_state(saved, runtime: Runtime):
    _, config, training = saved
    other = build_training(config, runtime)
    random.seed(11)
    expected = random.random()
    random.seed(12)
    assert resume(other).position == POSITION
    assert random.random() == expected
    assert optimizer_step(other.optimizer) == 0
    pairs = zip(other.model.parameters(), training.model.parameters(), strict=True)
    assert all(torch.equal(one.to_local(), two.to_local()) for one, two in pairs)  # pyright: ignore


def test_random_state_of_another_number_of_ranks_is_left_alone(saved, runtime: Runtime):
    config = saved[1]
    two_ranks = replace(runtime, launch=replace(runtime.launch, world_size=2))
    random.seed(12)
    expected = random.Random(12).random()
    assert resume(replace(build_training(config, runtime), runtime=two_ranks)).position == POSITION
    assert random.random() == expected


@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("model", {"init_std": 0.9, "max_positions": 4096}),
        ("optim", {"lr": 1.0, "clip_norm": 0.0}),
        ("train", {"max_steps": 99, "global_batch_size": 8, "micro_batch_size": 2}),
        ("moe", {"aux_loss_coeff": 0.5}),
        ("experts", {"backend": "loop"}),
    ],
)
def test_what_may_change_between_two_starts_is_accepted(saved, runtime: Runtime, section: str, values: dict):
    assert resume(build_training(changed(saved[1], section, **values), runtime)).position == POSITION


def test_what_is_not_as_it_was_saved_is_returned_and_said(saved, runtime: Runtime, caplog: pytest.LogCaptureFixture):
    config = changed(changed(saved[1], "train", max_steps=99), "moe", aux_loss_coeff=0.5)
    training = build_training(config, runtime)
    with caplog.at_level(logging.INFO):
        found = resume(training).changed
    assert found == {"train.max_steps": [12, 99], "moe.aux_loss_coeff": [0.01, 0.5]}
    text = "\n".join(record.message for record in caplog.records)
    assert "moe.aux_loss_coeff: 0.01 -> 0.5" in text
    assert "THE LEARNING RATE JUMPS: step 4 has " in text


def test_a_resume_that_changes_nothing_says_nothing(saved, runtime: Runtime, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO):
        assert resume(build_training(saved[1], runtime)).changed == {}
    assert "changed" not in caplog.text


def test_a_head_width_that_is_written_out_is_the_same_model(saved, runtime: Runtime):
    config = saved[1]
    assert config.model.head_dim is None
    explicit = changed(config, "model", head_dim=config.model.resolved_head_dim)
    assert resume(build_training(explicit, runtime)).position == POSITION


def test_a_run_that_has_all_its_steps_says_so_once(saved, runtime: Runtime, caplog: pytest.LogCaptureFixture):
    resume(build_training(changed(saved[1], "train", max_steps=4), runtime))
    assert "train.max_steps=4: " not in caplog.text
    for max_steps in (3, 2):
        config = changed(changed(saved[1], "train", max_steps=max_steps), "optim", warmup_steps=1)
        training = build_training(config, runtime)
        resume(training)
        (told,) = [record.message for record in caplog.records if record.message.startswith("train.max_steps=")]
        assert told == (
            f"train.max_steps={max_steps}: the run is at step 3 already, so that it is evaluated and ends. To train "
            "on, set train.max_steps, the steps of the whole run, above 3; or start a new run from these weights with "
            f"another run.name and checkpoint.init_from={checkpoint_dir(config) / 'step_00000003'}"
        )
        caplog.clear()
        resume(replace(training, runtime=replace(runtime, launch=replace(runtime.launch, rank=1, world_size=2))))
        assert "train.max_steps=" not in caplog.text


def folder_of_steps(saved, folder: Path, publications: dict[int, int]) -> Path:
    """A folder with copies of the saved step, by their number and in the order in which they were published."""
    for number, publication in publications.items():
        step_dir = folder / f"step_{number:08d}"
        shutil.copytree(checkpoint_dir(saved[1]) / "step_00000003", step_dir)
        edit_manifest(step_dir, publication=publication)
    return folder


def test_resume_from_a_folder_takes_its_newest_complete_step(saved, runtime: Runtime, tmp_path: Path, caplog):
    steps = folder_of_steps(saved, tmp_path, {1: 1, 9: 2, 3: 3})
    (steps / "step_00000012").mkdir()
    config = changed(saved[1], "checkpoint", resume=str(steps))
    with caplog.at_level(logging.INFO):
        assert resume(build_training(config, runtime)).position == POSITION
    assert f"checkpoint.resume={steps}: step_00000003 is the newest complete step there" in caplog.messages
    # Half a step stays as it is: another run may be writing it.
    assert (steps / "step_00000012").is_dir()


def test_resume_from_a_step_does_not_look_at_the_others(saved, runtime: Runtime, tmp_path: Path, caplog):
    steps = folder_of_steps(saved, tmp_path, {3: 1, 9: 2})
    (steps / "step_00000009/manifest.json").write_text("{")
    config = changed(saved[1], "checkpoint", resume=str(steps / "step_00000003"))
    with caplog.at_level(logging.INFO):
        assert resume(build_training(config, runtime)).position == POSITION
    assert "newest complete step" not in caplog.text
    with pytest.raises(CheckpointError, match=r"step_00000009/manifest\.json: .* Or remove "):
        build_training(changed(config, "checkpoint", resume=str(steps)), runtime)


@pytest.mark.parametrize("name", ["nowhere", "empty", "file"])
def test_resume_from_what_has_no_step_is_refused(saved, runtime: Runtime, tmp_path: Path, name: str):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    config = changed(saved[1], "checkpoint", resume=str(tmp_path / name))
    with pytest.raises(CheckpointError, match=rf"^{tmp_path / name}: no manifest\.json"):
        resume(build_training(config, runtime))


def from_weights(saved, runtime: Runtime, folder: Path, **model: object) -> None:
    """Start a new run from the saved weights, with a changed model."""
    config = changed(changed(saved[1], "run", dir=str(folder)), "checkpoint", init_from=str(checkpoint_dir(saved[1])))
    resume(build_training(changed(config, "model", **model), runtime))


def test_a_model_that_computes_something_else_than_the_initial_weights_was_warned_of(
    saved, runtime: Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    from_weights(saved, runtime, tmp_path)
    assert "THE MODEL IS NOT" not in caplog.text
    from_weights(saved, runtime, tmp_path, rope_theta=7.0, top_k=3)
    expected = (
        "THE MODEL IS NOT THE ONE THAT WAS SAVED: model.rope_theta was 10000.0, now 7.0; model.top_k was 2, now 3"
    )
    assert expected in caplog.text


def test_initial_weights_of_another_number_of_heads_are_refused(saved, runtime: Runtime, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"model\.num_heads=1: .*step_00000003 has 4\."):
        from_weights(saved, runtime, tmp_path, num_heads=1, num_kv_heads=1)


def test_every_difference_is_named_with_both_values(saved, runtime: Runtime):
    config = changed(changed(saved[1], "model", top_k=1, rope_theta=7.0), "train", seed=4)
    with pytest.raises(CheckpointError) as caught:
        resume(build_training(config, runtime))
    text = str(caught.value)
    assert text.startswith("step_00000003: saved with another configuration: ")
    for difference in (
        "model.top_k was 2, now 1",
        "model.rope_theta was 10000.0, now 7.0",
        "train.seed was 0, now 4",
    ):
        assert difference in text
    assert text.count(" was ") == 3


def test_same_sequences_under_another_name_are_the_same_data(saved, runtime: Runtime, tmp_path: Path):
    folder, config, _ = saved
    moved = tmp_path / "moved.fa"
    moved.write_bytes((folder / "genome.fa").read_bytes())
    assert resume(build_training(changed(config, "data", path=str(moved)), runtime)).position == POSITION


@pytest.mark.parametrize("state", [{}, {"position": {}, "data": {}, "config": {"model": {}}}, {"config": None}])
def test_a_step_that_no_run_saved_is_refused(saved, runtime: Runtime, tmp_path: Path, state: dict):
    _, config, _ = saved
    step_dir = tmp_path / "step_00000003"
    step_dir.mkdir()
    for path in (checkpoint_dir(config) / step_dir.name).iterdir():
        (step_dir / path.name).write_bytes(path.read_bytes())
    edit_manifest(step_dir, state=state)
    with pytest.raises(CheckpointError, match="step_00000003"):
        resume(build_training(changed(config, "checkpoint", resume=str(step_dir)), runtime))


def test_manifest_says_what_was_run(saved):
    _, config, _ = saved
    state = json.loads((checkpoint_dir(config) / "step_00000003/manifest.json").read_text())["state"]
    assert state.keys() == {"position", "optimizer_step", "data", "experts_backend", "layout", "config"}
    assert state["position"] == {"step": 3, "consumed_samples": 12}
    assert state["layout"] == {"dp": 1, "ep": 1, "tp": 1, "dp_replicate": 1, "expert_tp": 1, "world_size": 1}
    assert state["config"]["model"]["top_k"] == 2


def test_never_is_refused_only_where_a_step_is(saved, runtime: Runtime, tmp_path: Path):
    never = changed(saved[1], "checkpoint", resume="never")
    with pytest.raises(ConfigError, match=r"checkpoint\.resume=never: .*step_00000003"):
        resume(build_training(never, runtime))
    assert resume(build_training(changed(never, "checkpoint", ckpt_dir=str(tmp_path)), runtime)).position == (0, 0)


def test_checkpoints_are_in_the_run_unless_told_otherwise():
    config = changed(Config(), "run", dir="/runs", name="one")
    assert run_dir(config) == Path("/runs/one")
    assert checkpoint_dir(config) == Path("/runs/one/checkpoints")
    assert checkpoint_dir(changed(config, "checkpoint", ckpt_dir="/ckpt")) == Path("/ckpt")
