"""A start that must not happen: the same clear error on every rank, exit code 2, and nothing on disk changed."""

import re
import shutil
from pathlib import Path

import pytest

from tests.distributed import train_jobs as jobs
from tests.helpers.pool import RankPool
from tests.helpers.tiny_runs import arguments, content, losses, write_genome

# A refusal that takes longer than this counts as a hang.
TIMEOUT_S = 60
EP2 = "parallel.ep=2"
STEP = "run/checkpoints/step_00000006"


@pytest.fixture(scope="module")
def trained(ranks: RankPool, tmp_path_factory) -> Path:
    """The folder of a run of six steps on two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    ranks.run(jobs.command, 2, arguments(folder, EP2, max_steps=6))
    assert list(losses(folder / "run")) == [1, 2, 3, 4, 5, 6]
    return folder


@pytest.fixture
def copied(trained: Path, tmp_path: Path) -> Path:
    """A copy of it to spoil; its step is at `STEP`."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return tmp_path


def refusal(ranks: RankPool, start: list[str], world_size: int = 2) -> str:
    """The error that every rank ended with, and rank 0 alone printed."""
    ended = ranks.run(jobs.command, world_size, start, timeout_s=TIMEOUT_S)
    assert [one.code for one in ended] == [2] * world_size, ended
    assert "Traceback" not in ended[0].text
    # Rank 0 speaks for all, each of which found it.
    assert [one.text for one in ended[1:] if "Error: " in one.text] == []
    return re.sub(r"^.*?^(?=\w+Error: )", "", ended[0].text, flags=re.S | re.M).rstrip()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("model.top_k=3", "model.top_k was 2, now 3"),
        ("model.num_heads=2", "model.num_heads was 4, now 2"),
        ("model.rope_theta=500", "model.rope_theta was 10000.0, now 500.0"),
        ("model.norm_eps=1e-6", "model.norm_eps was 1e-05, now 1e-06"),
        ("train.seed=9", "train.seed was 0, now 9"),
        ("data.seq_length=32", "data.seq_length was 64, now 32"),
        ("data.stride=8", "data.stride was 0, now 8"),
        ("data.heldout_fraction=0.2", "data.heldout_fraction was 0.1, now 0.2"),
        ("data.reverse_complement=false", "data.reverse_complement was True, now False"),
    ],
)
def test_another_computation_or_order_is_refused_by_key(ranks: RankPool, trained: Path, change: str, named: str):
    # Two heads of 16 channels have the tensors of four heads of 8.
    heads = ("model.num_kv_heads=2", "model.head_dim=16") if "num_heads" in change else ()
    before = content(trained)
    error = refusal(ranks, arguments(trained, EP2, change, *heads, max_steps=6))
    assert error.startswith("CheckpointError: step_00000006: saved with another configuration: ")
    assert named in error
    assert "config.yaml" in error
    assert content(trained) == before


def test_other_sequences_are_refused(ranks: RankPool, trained: Path, tmp_path: Path):
    before = content(trained)
    other = write_genome(tmp_path / "other.fa", seed=1)
    error = refusal(ranks, arguments(trained, EP2, f"data.path={other}", max_steps=6))
    was, now = re.escape(f"{trained}/genome.fa"), re.escape(str(other))
    assert re.search(
        rf"step_00000006: .* configuration: data\.path was '{was}', now '{now}', which holds other data\.", error
    )
    assert content(trained) == before


def test_other_shapes_are_refused_by_tensor(ranks: RankPool, trained: Path):
    before = content(trained)
    error = refusal(ranks, arguments(trained, EP2, "model.intermediate_size=64", max_steps=6))
    name = "model.layers.0.moe.experts.gate_up"
    assert error.startswith("CheckpointError: step_00000006: ")
    assert f"step_00000006: '{name}' is [8, 64, 32] on disk, [8, 128, 32] in the model." in error
    assert "optimizer.exp_avg.layers.1.moe.experts.down" in error
    assert content(trained) == before


def test_init_from_another_model_is_refused(ranks: RankPool, trained: Path, tmp_path: Path):
    change = f"checkpoint.init_from={trained / STEP}"
    error = refusal(ranks, arguments(tmp_path, EP2, change, "model.num_layers=3", max_steps=6))
    assert error == (f"CheckpointError: model.num_layers=3: {trained / STEP} has 2. Set model.num_layers=2.")


@pytest.mark.parametrize("how", ["resume", "init_from"])
def test_a_step_that_is_replaced_while_it_is_read_is_refused(ranks: RankPool, trained: Path, tmp_path: Path, how: str):
    start = arguments(
        tmp_path, EP2, f"checkpoint.{how}={trained / STEP}", f"data.path={trained}/genome.fa", max_steps=6
    )
    ended = ranks.run(jobs.command_on_a_step_that_is_replaced, 2, start, timeout_s=TIMEOUT_S)
    assert [one.code for one in ended] == [2, 2]
    assert f"CheckpointError: {trained / STEP}: rank 1 read another manifest.json than rank 0." in ended[0].text


def test_resume_never_is_refused_where_there_is_something_to_overwrite(ranks: RankPool, trained: Path):
    before = content(trained)
    error = refusal(ranks, arguments(trained, EP2, "checkpoint.resume=never", max_steps=6))
    assert error.startswith("ConfigError: checkpoint.resume=never: ")
    assert "has step_00000006, which would be overwritten. Set another run.name" in error
    assert content(trained) == before


def test_resume_from_what_is_no_step_is_refused(ranks: RankPool, trained: Path):
    before = content(trained)
    for path in (trained / "nowhere", trained / "run"):
        error = refusal(ranks, arguments(trained, EP2, f"checkpoint.resume={path}", max_steps=6))
        assert error.startswith(f"CheckpointError: {path}: no manifest.json, so this is not a complete step.")
    assert content(trained) == before


@pytest.mark.parametrize("name", ["__0_0.distcp", "__1_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_damaged_file_is_named(ranks: RankPool, copied: Path, name: str, damage: str):
    path = copied / STEP / name
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle] ^= 1
    path.write_bytes(data if damage == "flipped" else data[:middle])
    before = content(copied)
    error = refusal(ranks, arguments(copied, EP2, max_steps=6))
    assert error.startswith(f"CheckpointError: {path}: ")
    assert "Restore the file from a copy, or resume from another step." in error
    assert content(copied) == before


def test_a_damaged_step_can_be_left_out(ranks: RankPool, copied: Path):
    (copied / STEP / "manifest.json").write_text("{")
    resume = f"checkpoint.resume={copied / 'run/checkpoints/step_00000003'}"
    seen = ranks.run(jobs.watch, 2, arguments(copied, EP2, resume, max_steps=6))
    assert [(one.start, one.ended.code) for one in seen] == [((3, 12), 0)] * 2


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        (None, "no such file. Give the path of a FASTA file that every rank can read."),
        ("", "empty (0 bytes). Give a FASTA file, .gz or plain."),
        ("\n", "empty (it holds no record). Give a FASTA file, .gz or plain."),
        ("ACGT\n", "not FASTA (line 1 does not start with '>'). Give a FASTA file, .gz or plain."),
        (
            ">one\nACGT\n>two\nA\n",
            "record 2 ('two') has length 1; a sequence needs at least 2 bases. Remove the record.",
        ),
    ],
    ids=["missing", "empty", "no_record", "not_fasta", "short_sequence"],
)
def test_data_that_cannot_be_read_is_named(ranks: RankPool, tmp_path: Path, text: str | None, rule: str):
    path = tmp_path / "data.fa"
    if text is not None:
        path.write_text(text)
    assert refusal(ranks, arguments(tmp_path, EP2, f"data.path={path}")) == f"DataError: data.path={path}: {rule}"
    assert [one.name for one in tmp_path.iterdir() if one != path] == ["genome.fa"]


@pytest.mark.parametrize("key", ["run.dir", "checkpoint.ckpt_dir"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(ranks: RankPool, tmp_path: Path, key: str):
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" / "below"
    error = refusal(ranks, arguments(tmp_path, EP2, f"{key}={folder}"))
    assert error.startswith(f"ConfigError: {key}={folder}: cannot write ")
    assert error.endswith(f"(Not a directory). Set {key} to a folder that can be written.")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_ranks_that_read_different_files_are_refused(ranks: RankPool, tmp_path):
    start = arguments(tmp_path, EP2)
    # The same number of bases, so that nothing else could show it.
    paths = [str(write_genome(tmp_path / f"host{host}.fa", seed=host)) for host in (0, 1)]
    ended = ranks.run(jobs.command_on_own_file, 2, start, paths, timeout_s=TIMEOUT_S)
    assert [one.code for one in ended] == [2, 2]
    assert f"data.path={tmp_path}/genome.fa: rank 1 read other sequences than rank 0." in ended[0].text
    assert "Give every host the same files." in ended[0].text


def test_ranks_that_were_started_differently_are_refused_before_anything_is_made(ranks: RankPool, tmp_path: Path):
    own = [["run.name=at_10_59", "optim.lr=1e-3"], ["run.name=at_11_00", "optim.lr=2e-3"]]
    start = [one for one in arguments(tmp_path, EP2) if not one.startswith("run.name=")]
    ended = ranks.run(jobs.command_with_own_arguments, 2, start, own, timeout_s=TIMEOUT_S)
    assert [one.code for one in ended] == [2, 2]
    assert ended[0].text.rstrip().splitlines()[-1] == (
        "ConfigError: run.name=at_10_59 on rank 0, but at_11_00 on rank 1 (2 keys differ): every rank must have the "
        "same configuration. Not rank 0's: rank 1. Start all ranks with the same arguments, and write out what is "
        "computed at the start, such as the time of ${now:...}."
    )
    assert "ConfigError" not in ended[1].text
    assert [path.name for path in tmp_path.iterdir()] == ["genome.fa"]
