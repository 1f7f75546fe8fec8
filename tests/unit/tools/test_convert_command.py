import argparse

import pytest

from tools.convert_checkpoint import build_parser, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [("5GB", 5 * 10**9), ("500mb", 5 * 10**8), ("2GiB", 2**31), ("1.5 kB", 1500), ("123", 123), ("7G", 7 * 10**9)],
)
def test_sizes_are_read(text: str, size: int):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "0", "-5GB", "GB", "5TB", "5 5", "5i", "iB"])
def test_what_is_no_size_is_refused(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match=r"no size\. Give one such as 5GB or 500MB"):
        parse_size(text)


@pytest.mark.parametrize(
    "line",
    [
        ["a", "b"],
        ["a", "--to", "hf"],
        ["a", "b", "--to", "pt"],
        ["a", "b", "--to", "hf", "--dry-run", "--verify"],
        ["a", "b", "--to", "hf", "--workers", "0"],
        ["a", "b", "--to", "hf", "--dtype", "int8"],
    ],
)
def test_a_wrong_command_line_is_refused(line: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(line)
    assert caught.value.code == 2
    assert "error:" in capsys.readouterr().err
