"""scaling: what each size measures, the efficiency of its points, and results that are put together from files."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from moe_framework.errors import ConfigError
from tests.unit.tools.test_benchmark_train_step_options import CONFIGS, MEASUREMENT
from tools import benchmark
from tools.benchmarks.scaling import report, run
from tools.benchmarks.scaling.points import points_of, read_results
from tools.benchmarks.scaling.sizes import Growth, plan
from tools.benchmarks.train_step.options import Options

EP = Growth("ep", experts_per_rank=4)
DP = Growth("dp", experts_per_rank=4)


def planned(*overrides: str, ranks: tuple[int, ...] = (1, 2), growth: Growth = EP) -> list[Options]:
    return plan("L0_sanity", overrides, (CONFIGS, None), ranks, growth, **(MEASUREMENT | {"peers": []}))


def result(ranks: int, rate: float | None, *, exchange: tuple[float, float] | None = None) -> dict[str, Any]:
    """As the JSON of train-step has it; the token exchange as seconds, and those of them that are exposed."""
    parts = [] if exchange is None else [{"part": "token exchange", "seconds": exchange[0]}]
    for part in parts:
        part["exposed_seconds"] = exchange[1]  # pyright: ignore
    row = {
        "name": "ours:bf16",
        "error": "out of memory" if rate is None else None,
        "seconds": None if rate is None else {"median": 1.0, "lower_quartile": 0.9, "upper_quartile": 1.1},
        "tokens_per_second_per_gpu": rate,
        "peak_bytes": 2_000_000_000,
        "breakdown": {"communication": parts},
    }
    config = {
        "run": {"name": f"run {ranks}"},
        "parallel": {"dp": 1, "ep": ranks, "tp": 1},
        "model": dict.fromkeys(("num_layers", "hidden_size", "intermediate_size", "top_k", "vocab_size"), 2),
        "train": {"micro_batch_size": 1, "global_batch_size": ranks},
        "data": {"seq_length": 64},
    }
    config["model"]["num_experts"] = 8 * ranks
    return {
        "benchmark": "train-step",
        "num_ranks": ranks,
        "machine": {"gpu": "Some GPU", "cpu": "Some CPU"},
        "options": {"config": config, "config_name": "NAME", "warmup": 1, "repetitions": 2},
        "rows": [row],
    }


def test_each_size_has_as_many_experts_on_a_rank_and_the_same_tokens():
    sizes = planned(ranks=(1, 2, 4))
    assert [size.num_ranks for size in sizes] == [1, 2, 4]
    assert [size.config.parallel.ep for size in sizes] == [1, 2, 4]
    assert [size.config.model.num_experts for size in sizes] == [4, 8, 16]
    assert len({size.config.train.micro_batch_size for size in sizes}) == 1
    assert [size.config.train.global_batch_size / size.num_ranks for size in sizes] == [
        sizes[0].config.train.micro_batch_size
    ] * 3


def test_data_parallelism_grows_with_the_model_as_it_is():
    sizes = planned("parallel.ep=2", ranks=(2, 4), growth=DP)
    assert [(size.config.parallel.dp, size.config.parallel.ep) for size in sizes] == [(1, 2), (2, 2)]
    assert len({size.config.model.num_experts for size in sizes}) == 1


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        ([], (2, 1), "--ranks=2 1 must be two or more numbers, rising"),
        ([], (1,), "--ranks=1 must be two or more numbers"),
        (["parallel.ep=2"], (1, 2), "parallel.ep=2: with --grow ep it follows from --ranks"),
        (["model.num_experts=4"], (1, 2), "Use --experts-per-rank"),
        (["parallel.tp=2"], (2, 4), "parallel.tp=2: with --grow ep all ranks are expert-parallel. Use --grow dp."),
    ],
)
def test_sizes_that_cannot_be_compared_are_refused(overrides: list[str], ranks: tuple[int, ...], message: str):
    with pytest.raises(ConfigError, match=message):
        planned(*overrides, ranks=ranks)


def test_a_launcher_is_refused_with_the_way_for_several_hosts(monkeypatch: pytest.MonkeyPatch):
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "x",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="give the files to scaling --from"):
        planned()


def test_efficiency_is_the_rate_over_that_of_the_fewest_ranks_that_ran():
    points = points_of([result(1, None), result(2, 100.0), result(8, 95.0, exchange=(0.02, 0.015))])
    assert [point.efficiency for point in points] == [None, 1.0, 0.95]
    assert [point.num_experts for point in points] == [8, 16, 64]
    assert points[0].error == "out of memory"
    assert (points[2].exchange_seconds, points[2].exchange_exposed_seconds) == (0.02, 0.015)
    assert points[1].exchange_seconds is None


def test_the_smallest_size_is_measured_again_at_the_end_and_each_result_is_kept_at_once(
    monkeypatch: pytest.MonkeyPatch,
):
    rates = iter((100.0, 98.0, 96.0, 101.0))
    monkeypatch.setattr(run, "_measured", lambda options: result(options.num_ranks, next(rates)))
    kept: list[int] = []
    found = run.measure(planned(ranks=(1, 2, 4)), "text", lambda scaling: kept.append(len(scaling.points)))
    assert [(point.num_ranks, point.tokens_per_second_per_gpu) for point in found.points] == [
        (1, 100.0),
        (2, 98.0),
        (4, 96.0),
    ]
    assert [point.tokens_per_second_per_gpu for point in found.control] == [101.0]
    assert kept == [1, 2, 3, 3]
    assert "1 rank(s) measured again after all others, over the first time: ours:bf16 1.010." in report.to_markdown(
        found
    )


def test_markdown_says_how_much_of_the_exchange_was_hidden_and_why_a_size_failed():
    results = [result(1, 100.0), result(2, None), result(8, 95.0, exchange=(0.02, 0.015))]
    text = report.to_markdown(run.Scaling("text", points_of(results), [], results))
    lines = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in text.splitlines() if line[0:1] == "|"]
    assert lines[-1][1:9] == ["8", "8", "64", "1000.0 (900.0 to 1100.0)", "95", "0.950", "20.00", "25%"]
    assert lines[-2][1:5] == ["2", "2", "16", "failed"]
    assert {len(line) for line in lines} == {len(report.HEADER)}
    assert "ours:bf16 on 2 ranks: out of memory" in text


def written(folder: Path, *results: dict[str, Any]) -> list[Path]:
    files = [folder / f"{number}.json" for number in range(len(results))]
    for file, content in zip(files, results, strict=True):
        file.write_text(json.dumps(content))
    return files


def test_files_of_separate_runs_make_one_curve(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    files = written(tmp_path, result(8, 95.0), result(1, 100.0))
    argv = ["scaling", "--from", *map(str, files), "--json", str(tmp_path / "all.json")]
    assert benchmark.main(argv) == 0
    assert " 0.950 |" in capsys.readouterr().out
    found = json.loads((tmp_path / "all.json").read_text())
    assert [point["num_ranks"] for point in found["points"]] == [1, 8]
    assert found["results"][1]["rows"][0]["tokens_per_second_per_gpu"] == 95.0


def changed(section: str, key: str, value: Any) -> dict[str, Any]:
    other = deepcopy(result(8, 95.0))
    other["options"]["config"][section][key] = value
    return other


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed("model", "hidden_size", 3), r"1\.json: model\.hidden_size is 2 in .*0\.json and 3 here"),
        (changed("train", "micro_batch_size", 2), r"train\.micro_batch_size is 1"),
        (changed("parallel", "tp", 2), r"parallel\.tp is 1"),
        (result(1, 90.0), r"1\.json has 1 ranks, as has .*0\.json"),
        ({"benchmark": "collectives"}, "holds no result of train-step"),
    ],
)
def test_files_of_other_work_are_refused(other: dict[str, Any], message: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=message):
        read_results(written(tmp_path, result(1, 100.0), other))


def test_a_file_that_is_missing_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--from=.*none\.json cannot be read"):
        read_results([tmp_path / "none.json"])


def test_chart_is_drawn_also_where_a_size_failed(tmp_path: Path):
    pytest.importorskip("matplotlib")
    results = [result(1, 100.0), result(2, None), result(8, 95.0)]
    report.write_chart(run.Scaling("text", points_of(results), [], results), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_one_and_two_ranks_are_measured_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    sizes = ["model.num_layers=1", "model.hidden_size=32", "model.intermediate_size=16", "data.seq_length=16"]
    options = ["--config-name", "L0_sanity", "--device", "cpu", "--repetitions", "2", "--warmup", "1"]
    argv = ["scaling", *options, "--ranks", "1", "2", "--experts-per-rank", "2", "--json", str(tmp_path / "x.json")]
    assert benchmark.main([*argv, *sizes]) == 0
    found = json.loads((tmp_path / "x.json").read_text())
    assert [(point["num_ranks"], point["num_experts"]) for point in found["points"]] == [(1, 2), (2, 4)]
    rates = [point["tokens_per_second_per_gpu"] for point in found["points"]]
    assert found["points"][1]["efficiency"] == pytest.approx(rates[1] / rates[0])
    assert found["control"][0]["num_ranks"] == 1
    out, err = capsys.readouterr()
    assert "## scaling on ranks on" in out
    assert "scaling 3/3: 1 ranks, 2 experts, about " in err
