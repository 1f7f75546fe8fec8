"""Running a plan: the references first, then the layouts of each number of ranks in one set of processes."""

import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessException

from moe_framework.errors import MoeFrameworkError
from tools.benchmarks.ranks import run_on_ranks
from tools.parity.comparison import findings_path, run_cases, run_exact, run_moved
from tools.parity.inputs import write_documents
from tools.parity.plan import RANDOM, Plan, by_world_size, choose_device, exact_case, on_device, with_data
from tools.parity.progress import Steps, say
from tools.parity.reference import Reference, read_reference, run_reference
from tools.parity.report import Report
from tools.parity.tolerances import NUM_MOVES
from tools.parity.verdicts import case_to_move, judge, tolerances_of


def execute(plan: Plan) -> Report:
    """Run the references and the layouts, and judge them.

    Args:
        plan: From `make_plan`.

    Returns:
        The report.

    Raises:
        MoeFrameworkError: The device lacks the precision or the expert backend, or the data cannot be read.
        ProcessException: The reference failed by a fault of the framework.
    """
    device = choose_device(plan, torch.cuda.device_count() if torch.cuda.is_available() else 0)
    plan = on_device(plan, device)
    options = plan.options
    with tempfile.TemporaryDirectory(prefix="parity_") as name:
        folder = Path(name)
        if options.data == RANDOM:
            path = folder / "documents.fa"
            write_documents(path, plan.cases[0].config, steps=options.steps, seed=options.seed)
            plan = with_data(plan, str(path))
        exact_runs = sum(exact_case(name, config) is not None for name, config in plan.references.items())
        steps = Steps.starting_now(options.steps * (len(plan.references) + exact_runs + len(plan.cases)))
        references = {}
        for reference, config in plan.references.items():
            (folder / reference).mkdir()
            say(f"reference ({reference}): 1 rank on {device}")
            error = run_on_ranks(_reference_or_error, 1, device, config, options, folder / reference, steps)
            if error is not None:
                raise error
            steps.done += options.steps
            references[reference] = read_reference(folder / reference)
            exact = exact_case(reference, config)
            if exact is not None:
                say(f"{exact.name}: 1 rank on {device}")
                run_on_ranks(run_exact, 1, device, exact, options, folder, steps)
                steps.done += options.steps
        errors = _run_layouts(plan, device, folder, steps)
        for reference in references.values():
            _run_moved(plan, reference, device, folder, steps)
        tolerances = {name: tolerances_of(plan, reference, folder) for name, reference in references.items()}
        layouts = [
            judge(case, folder, number, references[case.reference], tolerances[case.reference], errors.get(number))
            for number, case in enumerate(plan.cases)
        ]
        backend = next(iter(references.values())).experts_backend
        printed = next(iter(tolerances.values()))
    return Report(plan, device, printed, backend, tuple(layouts))


def _reference_or_error(*arguments: Any) -> MoeFrameworkError | None:
    """Run a reference; hand back a user's mistake, which would lose its type on the way out of the process."""
    try:
        run_reference(*arguments)
    except MoeFrameworkError as error:
        return error
    return None


def _run_layouts(plan: Plan, device: str, folder: Path, steps: Steps) -> dict[int, str]:
    """Run all layouts; return why the ranks of some ended early, by the case's number."""
    errors: dict[int, str] = {}
    numbers = {id(case): number for number, case in enumerate(plan.cases)}
    for world_size, cases in by_world_size(plan.cases):
        left = [(numbers[id(case)], case) for case in cases]
        while left:
            say(f"{world_size} ranks on {device}: {'; '.join(case.name for _, case in left)}")
            try:
                run_on_ranks(run_cases, world_size, device, left, plan.options, folder, replace(steps))
            except ProcessException as error:
                # The findings of the layouts before it are in their files, and the ones after it get new ranks.
                failed = next(number for number, _ in left if not findings_path(folder, number).exists())
                say(traceback.format_exc())
                errors[failed] = str(error).strip().splitlines()[-1]
            done = [number for number, _ in left if number in errors or findings_path(folder, number).exists()]
            steps.done += plan.options.steps * len(done)
            left = [(number, case) for number, case in left if number not in done]
    return errors


def _run_moved(plan: Plan, reference: Reference, device: str, folder: Path, steps: Steps) -> None:
    """Run a reference with moved weights, if that might explain what its layouts differ in."""
    wanted = case_to_move(plan, reference, folder)
    if wanted is None:
        return
    case, names = wanted
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    say(f"{case.name}: 1 rank on {device}, {NUM_MOVES} times, for {names[0]}{more}")
    steps.total += NUM_MOVES * plan.options.steps
    run_on_ranks(run_moved, 1, device, case, plan.options, folder, steps)
    steps.done += NUM_MOVES * plan.options.steps
