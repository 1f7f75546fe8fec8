"""Reading layouts, and the plan of configurations that follows from them."""

import subprocess
import sys
from dataclasses import replace

import pytest

from moe_framework.config.schema import Config
from moe_framework.errors import ConfigError
from tests.distributed.check_parity_jobs import tiny_config
from tests.helpers.tiny_runs import ROOT
from tools.parity.layouts import Layout, parse_layouts
from tools.parity.plan import Options, by_world_size, choose_device, make_plan

ONE_STEP = Options(steps=1)


def violations_of(layouts: list[Layout], config: Config | None = None, options: Options = ONE_STEP) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make_plan(config or tiny_config(), layouts, options)
    return caught.value.violations


def test_layouts_are_read_in_order_each_once():
    text = " dp=1, ep=2,tp=1 ; ep=2;tp=2,expert_tp=2;dp=4,dp_replicate=2;"
    assert parse_layouts(text) == [Layout(1, 2, 1), Layout(tp=2, expert_tp=2), Layout(dp=4, dp_replicate=2)]
    assert str(Layout(1, 2, 1)) == "dp=1,ep=2,tp=1"
    assert parse_layouts(str(Layout(4, 2, 2, 2, 2))) == [Layout(4, 2, 2, 2, 2)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dp=2,pp=2", "pp is no axis. Use dp, ep, tp, dp_replicate, expert_tp."),
        ("dp=2,dp=4", "dp is given twice"),
        ("dp=0", "dp=0 must be at least 1"),
        ("dp=two", "dp=two must be at least 1"),
        ("dp", "dp= must be at least 1"),
        (" ; ", "no layout"),
    ],
)
def test_a_layout_that_cannot_be_read_is_refused(text: str, reason: str):
    with pytest.raises(ConfigError, match=reason):
        parse_layouts(text)


def test_all_wrong_layouts_are_reported_at_once():
    with pytest.raises(ConfigError) as caught:
        parse_layouts("pp=2;dp=0;ep=2")
    assert len(caught.value.violations) == 2


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(ep=3), "parallel.ep=3 must divide model.num_experts=8"),
        (Layout(tp=8), "parallel.tp=8 must divide model.num_heads=4"),
        (Layout(tp=4, expert_tp=2), "parallel.expert_tp=2 must be 1 or parallel.tp=4"),
        (Layout(dp=2, dp_replicate=4), "parallel.dp_replicate=4 must divide parallel.dp=2"),
        (Layout(dp=16), "train.global_batch_size=8 must be a multiple of"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused_with_its_name(layout: Layout, reason: str):
    violations = violations_of([Layout(dp=2), layout])
    assert all(violation.endswith(f"(layout {layout})") for violation in violations)
    assert any(reason in violation for violation in violations)


def test_violations_of_all_layouts_come_together():
    assert len(violations_of([Layout(ep=3), Layout(tp=8)])) >= 2


def test_planning_needs_no_torch_and_starts_no_rank():
    code = (
        "import sys; from tools import check_parity as c;"
        "c.planned(c.parse(['--config-name', 'L0_sanity', '--layouts', 'ep=2', 'device=cpu']));"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_the_command_refuses_a_wrong_layout_with_exit_code_2():
    arguments = ["--config-name", "L0_sanity", "--layouts", "ep=3;pp=2"]
    command = [sys.executable, "tools/check_parity.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("ConfigError: --layouts=pp=2: pp is no axis")


def test_each_accumulation_is_a_case_with_the_same_global_batch():
    plan = make_plan(tiny_config(), [Layout(ep=2)], replace(ONE_STEP, accumulation=(1, 2)))
    assert [case.name for case in plan.cases] == ["dp=1,ep=2,tp=1 accumulation=1", "dp=1,ep=2,tp=1 accumulation=2"]
    assert [case.config.train.micro_batch_size for case in plan.cases] == [4, 2]
    assert {case.config.train.global_batch_size for case in plan.cases} == {8}
    assert list(plan.references) == ["one rank"]


def test_accumulation_that_is_not_whole_is_refused():
    violations = violations_of([Layout(ep=2)], options=replace(ONE_STEP, accumulation=(3,)))
    assert violations[0].startswith("--accumulation=3: train.global_batch_size=8 must be a multiple of")


def test_global_batch_balancing_is_compared_at_equal_accumulation():
    config = tiny_config("moe.aux_loss=global_batch")
    plan = make_plan(config, [Layout(ep=2), Layout(dp=4)], replace(ONE_STEP, accumulation=(1, 2)))
    assert {name: one.train.micro_batch_size for name, one in plan.references.items()} == {
        "1 micro-steps": 8,
        "2 micro-steps": 4,
    }
    assert all(plan.references[case.reference].train.micro_batch_size * case.accumulation == 8 for case in plan.cases)


def test_options_reach_every_configuration():
    options = replace(ONE_STEP, layers=1, precision="bf16", seed=7)
    plan = make_plan(tiny_config(), [Layout(ep=2)], options)
    for config in (plan.cases[0].config, *plan.references.values()):
        assert (config.model.num_layers, config.precision.mode, config.train.seed) == (1, "bf16", 7)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("expert_divisor", Layout()),
        ("router_tp_sum", Layout(ep=2)),
        ("norm_ep_sum", Layout(dp=2)),
        ("aux_dp", Layout()),
        ("replica_drift", Layout(dp=2)),
    ],
)
def test_a_fault_that_a_layout_cannot_have_is_refused(name: str, layout: Layout):
    violations = violations_of([layout], options=replace(ONE_STEP, inject=name))
    assert len(violations) == 1
    assert violations[0].startswith(f"--inject={name} needs")


def test_the_device_is_cuda_only_with_a_gpu_for_each_rank():
    plan = make_plan(tiny_config("device=auto"), [Layout(ep=2), Layout(ep=4)], ONE_STEP)
    assert [choose_device(plan, gpus) for gpus in (0, 2, 4)] == ["cpu", "cpu", "cuda"]
    assert [size for size, _ in by_world_size(plan.cases)] == [2, 4]
