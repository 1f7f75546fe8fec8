"""The command of tools/inspect_checkpoint.py, on steps that runs and conversions leave."""

import json
from pathlib import Path

import pytest

from moe_framework.checkpoint.store import CheckpointStore
from tests.unit.checkpoint.convert.test_steps import STATE, run_tensors, save_run
from tools.inspect_checkpoint import main


@pytest.mark.parametrize("has_optimizer", [True, False])
def test_the_step_and_whether_a_run_can_go_on_from_it_are_shown(tmp_path: Path, capsys, has_optimizer: bool):
    tensors = run_tensors()
    if not has_optimizer:
        tensors = {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}
    step_dir = save_run(tmp_path, tensors)
    state = "with the optimizer's state" if has_optimizer else "without an optimizer's state"
    assert main([str(step_dir), "--no-norms"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"{step_dir}: dcp, {len(tensors)} tensors; step 7, {state}"
    assert main([str(step_dir), "--no-norms", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["step"], found["optimizer"], len(found["tensors"])) == (7, has_optimizer, len(tensors))


def test_of_a_folder_of_steps_the_one_that_is_shown_is_named(tmp_path: Path, capsys):
    tensors = run_tensors()
    save_run(tmp_path, tensors)
    CheckpointStore(tmp_path, keep=0, async_save=False, group=None).save(12_000, tensors, STATE, {})
    assert main([str(tmp_path), "--no-norms"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{tmp_path / 'step_00012000'}: dcp, ")
    assert "; step 12,000, " in last


def test_weights_of_hugging_face_have_no_step(tmp_path: Path, capsys):
    pytest.importorskip("transformers", reason="needs the hf extra")
    from tests.unit.checkpoint.convert.folders import save_hf

    save_hf(tmp_path)
    assert main([str(tmp_path), "--no-norms"]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"{tmp_path}: hf, ")
    assert last.endswith(" tensors; without an optimizer's state")
