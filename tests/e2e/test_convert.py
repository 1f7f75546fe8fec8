"""The documented conversion commands, killed, starved of disk, and with a checkpoint larger than their memory."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.large_checkpoint import peak_anonymous_bytes, write_random_mixtral
from tests.unit.checkpoint.convert.folders import content

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_layers": 2, "hidden_size": 64, "intermediate_size": 48, "vocab_size": 101}
MIDDLE = {"num_layers": 4, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 1000}


def command(tool: str, *arguments: object) -> list[str]:
    return [sys.executable, f"tools/{tool}.py", *map(str, arguments)]


def run(tool: str, *arguments: object, timeout: float = 240) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(tool, *arguments), cwd=ROOT, capture_output=True, text=True, timeout=timeout)


@pytest.fixture(scope="module")
def hf(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "hf"
    write_random_mixtral(folder, **SMALL)
    return folder


@pytest.mark.slow
def test_the_documented_commands_convert_verify_and_inspect(hf: Path, tmp_path: Path):
    dcp, back = tmp_path / "dcp", tmp_path / "back"
    dry = run("convert_checkpoint", "--from", "hf", "--to", "dcp", hf, dcp, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    expert = "model.layers.0.block_sparse_moe.experts"
    assert (
        f"model.layers.0.moe.experts.down [8, 64, 48] bfloat16 ← 8 tensors: {expert}.0.w2.weight … {expert}.7.w2.weight"
        in dry.stdout
    )
    assert "nothing was written (--dry-run)" in dry.stdout
    assert os.listdir(tmp_path) == []

    there = run("convert_checkpoint", "--from", "hf", "--to", "dcp", hf, dcp, "--verify")
    assert there.returncode == 0, there.stderr
    assert f"tensors of {hf} come back unchanged" in there.stdout
    report = json.loads((tmp_path / "dcp.report.json").read_text())
    assert all(len(tensor["sha256"]) == 64 and tensor["sources"] for tensor in report["tensors"])
    assert len(report["verified"]) == 2 * (8 * 3 + 7) + 3
    assert run("convert_checkpoint", "--from", "dcp", "--to", "hf", dcp, back).returncode == 0

    table = run("inspect_checkpoint", dcp, "--json")
    assert {row["name"] for row in json.loads(table.stdout)["tensors"]} == {row["name"] for row in report["tensors"]}
    same = run("inspect_checkpoint", hf, "--diff", dcp)
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "0 of 21 tensors differ")
    one = run("inspect_checkpoint", back, "--tensor", f"{expert}.3.w1.weight")
    assert "shape: [48, 64]" in one.stdout


@pytest.mark.slow
def test_verify_only_finds_a_flipped_byte_later(hf: Path, tmp_path: Path):
    dcp, back = tmp_path / "dcp", tmp_path / "back"
    assert run("convert_checkpoint", "--to", "dcp", hf, dcp).returncode == 0
    assert run("convert_checkpoint", "--to", "hf", dcp, back).returncode == 0
    assert run("convert_checkpoint", "--to", "hf", dcp, back, "--verify-only").returncode == 0
    path = next(back.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x40
    path.write_bytes(data)
    found = run("convert_checkpoint", "--to", "hf", dcp, back, "--verify-only")
    assert found.returncode == 2
    assert "does not come back" in found.stderr
    differ = run("inspect_checkpoint", dcp, "--diff", back)
    assert differ.returncode == 1
    assert differ.stdout.splitlines()[-1] == "1 of 21 tensors differ"


def test_an_error_is_one_line_without_a_traceback(hf: Path, tmp_path: Path):
    (tmp_path / "dcp").mkdir()
    refused = run("convert_checkpoint", "--to", "dcp", hf, tmp_path / "dcp")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1] == (
        f"CheckpointError: {tmp_path / 'dcp'}: exists. Give another name, or remove it first."
    )
    assert "Traceback" not in refused.stderr


def test_ctrl_c_leaves_nothing(tmp_path: Path):
    write_random_mixtral(tmp_path / "hf", **MIDDLE)
    process = subprocess.Popen(
        command("convert_checkpoint", "--to", "dcp", tmp_path / "hf", tmp_path / "dcp"),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "dcp.partial").exists() and process.poll() is None:
        time.sleep(1e-3)
    process.send_signal(signal.SIGINT)
    _, text = process.communicate(timeout=60)
    if process.returncode == 0:
        pytest.skip("the conversion was faster than the signal")
    assert process.returncode == 130, text
    assert text.splitlines()[-1] == "Interrupted: nothing was left behind."
    assert sorted(os.listdir(tmp_path)) == ["hf"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_killed_at_random_moments_it_starts_again_cleanly(tmp_path: Path):
    hf, dcp, back = tmp_path / "hf", tmp_path / "dcp", tmp_path / "back"
    write_random_mixtral(hf, **MIDDLE)
    before = content(hf)
    started = time.monotonic()
    assert run("convert_checkpoint", "--to", "dcp", hf, tmp_path / "first").returncode == 0
    longest = time.monotonic() - started
    rng = random.Random(0)
    moments = []
    for number in range(20):
        process = subprocess.Popen(
            command("convert_checkpoint", "--to", "dcp", hf, dcp, "--verify"),
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # From the first sight of the folder on: what comes before is Python's start.
        while not (dcp.with_name("dcp.partial")).exists() and process.poll() is None:
            time.sleep(1e-3)
        time.sleep(rng.uniform(0, longest / 4) if number else 0)
        process.kill()
        process.wait()
        moments.append(dcp.with_name("dcp.partial").exists())
        if dcp.exists():  # it was done before the kill
            assert run("convert_checkpoint", "--to", "dcp", hf, dcp, "--verify-only").returncode == 0
            shutil.rmtree(dcp)
        assert content(hf) == before
    assert sum(moments) >= 5, f"hardly any kill hit the writing: {moments}"
    assert run("convert_checkpoint", "--to", "dcp", hf, dcp, "--verify").returncode == 0
    assert run("convert_checkpoint", "--to", "hf", dcp, back).returncode == 0
    assert not dcp.with_name("dcp.partial").exists()
    assert all(before[path.name] == path.read_bytes() for path in back.glob("*.safetensors"))


@contextlib.contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """Mount a file system of a few megabytes."""
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(tmp_path: Path):
    write_random_mixtral(tmp_path / "hf", **MIDDLE)
    with small_disk(tmp_path / "disk", 20):
        refused = run("convert_checkpoint", "--to", "dcp", tmp_path / "hf", tmp_path / "disk" / "dcp")
        assert refused.returncode == 2
        assert "Free some, or give a folder on another disk" in refused.stderr
        assert os.listdir(tmp_path / "disk") == []


def test_a_disk_that_fills_up_on_the_way_is_left_empty(tmp_path: Path):
    num_bytes = write_random_mixtral(tmp_path / "hf", **MIDDLE)
    program = (
        "import sys; sys.path.insert(0, '.')\n"
        "from moe_framework.checkpoint.convert import convert\n"
        "from tools import convert_checkpoint\n"
        "convert.check_space = lambda *_: None\n"
        "sys.exit(convert_checkpoint.main(sys.argv[1:]))"
    )
    with small_disk(tmp_path / "disk", num_bytes // 2**20 - 10):
        full = subprocess.run(
            [sys.executable, "-c", program, "--to", "dcp", tmp_path / "hf", tmp_path / "disk" / "dcp"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert full.returncode == 2, full.stderr
        assert "not written: No space left on device. Free some space" in full.stderr
        assert os.listdir(tmp_path / "disk") == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_depends_neither_on_the_model_nor_on_its_largest_tensor(tmp_path: Path):
    if shutil.disk_usage(tmp_path).free < 12 * 10**9:
        pytest.skip("needs 12 GB of disk")
    hf, dcp, back = tmp_path / "hf", tmp_path / "dcp", tmp_path / "back"
    # The largest stacked tensor: 8 · 2 · 7168 · 4096 bf16, 0.94 GB.
    total = write_random_mixtral(hf, num_layers=2, hidden_size=4096, intermediate_size=7168)
    assert total > 3e9
    drop_cached(hf)
    began = time.monotonic()
    shutil.copytree(hf, tmp_path / "copy")
    os.sync()
    copy_s = time.monotonic() - began
    shutil.rmtree(tmp_path / "copy")
    drop_cached(hf)
    began = time.monotonic()
    process = subprocess.Popen(command("convert_checkpoint", "--to", "dcp", hf, dcp), cwd=ROOT)
    peak_there = peak_anonymous_bytes(process)
    there_s = time.monotonic() - began
    assert process.returncode == 0
    process = subprocess.Popen(command("convert_checkpoint", "--to", "hf", dcp, back), cwd=ROOT)
    peak_back = peak_anonymous_bytes(process)
    assert process.returncode == 0
    print(f"copy {copy_s:.0f} s, hf to dcp {there_s:.0f} s; peaks {peak_there / 1e9:.2f}, {peak_back / 1e9:.2f} GB")
    # torch and the threads' parts; twelve gigabytes take as much (docs/experiments.md).
    assert max(peak_there, peak_back) < 1.5e9
    same = subprocess.run(
        command("inspect_checkpoint", hf, "--diff", back), cwd=ROOT, capture_output=True, text=True, timeout=1800
    )
    assert same.returncode == 0, same.stdout


def drop_cached(folder: Path) -> None:
    os.sync()
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
