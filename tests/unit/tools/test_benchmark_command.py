"""The command line of tools/benchmark.py: mistakes are one line each and exit code 2, before torch is loaded."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tools import benchmark
from tools.benchmarks.machine import describe

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "required: BENCHMARK"),
        (["no-such"], "invalid choice: 'no-such'"),
        (["expert-block", "--tokens", "0"], "argument --tokens: '0' is no integer of at least 1"),
        (["expert-block", "--num-experts", "8", "x"], "argument --num-experts: 'x' is no integer of at least 1"),
        (["train-step", "--config-name", "x", "--published", "a=b"], "'a=b' is not NAME=RATIO"),
        (["expert-block", "--dtype", "fp16"], "invalid choice: 'fp16'"),
    ],
)
def test_a_mistyped_command_line_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_sizes_that_do_not_fit_are_one_line_each_and_exit_code_2(capsys: pytest.CaptureFixture[str]):
    assert benchmark.main(["expert-block", "--device", "cpu", "--top-k", "9", "--ep", "3"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == (
        "ConfigError: --top-k=9 must be at most --num-experts=8. Lower --top-k.\n"
        "ConfigError: --ep=3 must divide --num-experts=8. Use a divisor, or other experts.\n"
    )


def test_the_command_line_is_parsed_without_torch():
    code = "import sys; from tools import benchmark; benchmark.build_parser(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_machine_description_names_cpu_and_torch():
    import torch

    machine = describe(torch.device("cpu"))
    assert machine.cpu
    assert machine.cores >= 1
    assert machine.gpu is None
    assert f"torch {torch.__version__}, " in machine.sentence()
    assert ", 2 threads, " in replace(machine, threads=2).sentence()
    assert ", 1 thread, " in replace(machine, threads=1).sentence()
