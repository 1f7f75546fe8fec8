"""The runs of tools/check_parity.py on a model whose steps take milliseconds; called on the ranks of the pool."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from moe_framework.config.load import load_config
from moe_framework.config.schema import Config
from tests.helpers.tiny_runs import ROOT
from tools.parity.comparison import run_cases, run_exact, run_moved
from tools.parity.inputs import write_documents
from tools.parity.layouts import parse_layouts
from tools.parity.plan import Case, Options, Plan, exact_case, make_plan, with_data
from tools.parity.progress import Steps
from tools.parity.reference import TENSORS, Reference, read_reference, run_reference
from tools.parity.report import LayoutReport
from tools.parity.verdicts import judge, tolerances_of

# Every pair of sizes differs, the vocabulary is odd, and clipping is active.
TINY = (
    "device=cpu",
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.intermediate_size=40",
    "model.num_kv_heads=2",
    "model.vocab_size=13",
    "data.seq_length=24",
    "train.global_batch_size=8",
    "train.micro_batch_size=1",
    "optim.clip_norm=0.5",
    "optim.lr=1e-3",
    "optim.warmup_steps=4",
    "moe.z_loss_coeff=1e-3",
)
# Large weights: norms of heads and a tied head have gradients that are small differences of large terms.
ILL_CONDITIONED = ("model.tie_embeddings=true", "model.qk_norm=true", "model.init_std=1.0")
CPU = torch.device("cpu")


def tiny_config(*changes: str) -> Config:
    return load_config("L0_sanity", (*TINY, *changes), ROOT / "configs")


def planned(folder: Path, layouts: str, *changes: str, **options) -> Plan:
    """Plan layouts of the tiny model, with its documents in the folder."""
    plan = make_plan(tiny_config(*changes), parse_layouts(layouts), Options(**{"steps": 2, **options}))
    path = folder / "documents.fa"
    write_documents(path, plan.cases[0].config, steps=plan.options.steps, seed=plan.options.seed)
    return with_data(plan, str(path))


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def reference_job(plan: Plan, folder: Path) -> None:
    for name, config in plan.references.items():
        (folder / name).mkdir()
        run_reference(world(), CPU, config, plan.options, folder / name, Steps.starting_now(100))
        exact = exact_case(name, config)
        if exact is not None:
            run_exact(world(), CPU, exact, plan.options, folder, Steps.starting_now(100))


def layouts_job(plan: Plan, folder: Path, numbers: list[int]) -> None:
    cases = [(number, plan.cases[number]) for number in numbers]
    run_cases(world(), CPU, cases, plan.options, folder, Steps.starting_now(100))


def moved_job(plan: Plan, folder: Path, case: Case) -> None:
    run_moved(world(), CPU, case, plan.options, folder, Steps.starting_now(100))


def judged(plan: Plan, folder: Path, *, all_excused: bool = False) -> list[LayoutReport]:
    """Judge what the jobs left.

    Args:
        plan: What was run.
        folder: Has the findings.
        all_excused: Allow every tensor and norm the most that moved weights can excuse.
    """
    references = {name: read_reference(folder / name) for name in plan.references}
    tolerances = {name: tolerances_of(plan, reference, folder) for name, reference in references.items()}
    if all_excused:
        tolerances = {name: replace(own, moved=_far(references[name])) for name, own in tolerances.items()}
    return [
        judge(case, folder, number, references[case.reference], tolerances[case.reference], None)
        for number, case in enumerate(plan.cases)
    ]


def _far(reference: Reference) -> dict[str, dict[str, float]]:
    """Movements of the reference that no rounding makes."""
    norms = {f"grad_norm step {step + 1}": 1.0 for step in range(len(reference.figures.scalars))}
    return {kind: dict.fromkeys(reference.tensors(kind), 1.0) for kind in TENSORS} | {"scalars": norms}
