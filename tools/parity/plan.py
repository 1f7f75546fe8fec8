"""What will be run: a configuration for each layout and for its reference, checked before torch is imported."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import gcd

from moe_framework.config.schema import AUTO, Config
from moe_framework.config.validate import validate
from moe_framework.errors import ConfigError
from tools.parity.known_faults import check_possible
from tools.parity.layouts import Layout

RANDOM, CONFIGURED = "random", "config"


@dataclass(frozen=True)
class Options:
    """What the command line asked for, besides the configuration.

    Attributes:
        steps: Optimizer steps to compare.
        layers: Blocks of the model, or None for the configuration's.
        precision: `precision.mode`, or None for the configuration's.
        accumulation: Micro-batches per step, several to run each; empty for the configuration's micro-batch size.
        seed: `train.seed`: of weights, tokens and the order of the data.
        data: `random`: made-up documents with tokens of the whole vocabulary; `config`: the configuration's.
        inject: Name of a fault, or None.
    """

    steps: int
    layers: int | None = None
    precision: str | None = None
    accumulation: tuple[int, ...] = ()
    seed: int = 0
    data: str = RANDOM
    inject: str | None = None


@dataclass(frozen=True)
class Case:
    """One layout to compare.

    Attributes:
        layout: Its degrees.
        config: Its configuration, validated.
        reference: Name of the reference that it is compared with.
        accumulation: Micro-batches per step.
        name: How it is called in the report.
    """

    layout: Layout
    config: Config
    reference: str
    accumulation: int
    name: str


@dataclass(frozen=True)
class Plan:
    """Everything that will be run.

    Attributes:
        options: From the command line.
        references: Configurations of one rank, by name.
        cases: The layouts.
    """

    options: Options
    references: dict[str, Config]
    cases: tuple[Case, ...]

    @property
    def largest_world(self) -> int:
        """Most ranks of any layout."""
        return max(case.layout.world_size for case in self.cases)


def make_plan(config: Config, layouts: Iterable[Layout], options: Options) -> Plan:
    """Derive and check the configurations.

    Args:
        config: Composed, not validated; its degrees are replaced by each layout's.
        layouts: To check.
        options: From the command line.

    Returns:
        The plan.

    Raises:
        ConfigError: Every rule that any layout or the reference breaks.
    """
    base, violations = _common(config, options), []
    references, cases = {}, []
    for layout in layouts:
        for accumulation in options.accumulation or (None,):
            case = _case(base, layout, accumulation, violations)
            if case is None:
                continue
            cases.append(case)
            if case.reference not in references:
                one = _validated(_reference_config(base, case), 1, "reference", violations)
                references.update({case.reference: one} if one else {})
    if violations:
        raise ConfigError(list(dict.fromkeys(violations)))
    if options.inject is not None:
        check_possible(options.inject, ((case.layout, case.config) for case in cases))
    return Plan(options, references, tuple(cases))


def _common(config: Config, options: Options) -> Config:
    model, precision = config.model, config.precision
    if options.layers is not None:
        model = replace(model, num_layers=options.layers)
        kept = min(options.layers, precision.bf16_first_layers), min(options.layers, precision.bf16_last_layers)
        precision = replace(precision, bf16_first_layers=kept[0], bf16_last_layers=kept[1])
    if options.precision is not None:
        precision = replace(precision, mode=options.precision)  # pyright: ignore[reportArgumentType]
    train = replace(config.train, seed=options.seed)
    return replace(config, model=model, precision=precision, train=train)


def _case(base: Config, layout: Layout, accumulation: int | None, violations: list[str]) -> Case | None:
    rows, train, ranks = base.train.global_batch_size, base.train, layout.num_data_ranks
    if accumulation is not None:
        if rows % (ranks * accumulation):
            violations.append(
                f"--accumulation={accumulation}: train.global_batch_size={rows} must be a multiple of "
                f"accumulation·dp·ep = {accumulation}·{layout.dp}·{layout.ep} = {accumulation * ranks} at {layout}. "
                f"Use another --accumulation, or train.global_batch_size={accumulation * ranks}."
            )
            return None
        train = replace(train, micro_batch_size=rows // (ranks * accumulation))
    parallel = replace(base.parallel, **layout.degrees)
    config = _validated(replace(base, parallel=parallel, train=train), layout.world_size, str(layout), violations)
    if config is None:
        return None
    micro_steps = rows // (ranks * train.micro_batch_size)
    name = str(layout) if accumulation is None else f"{layout} accumulation={micro_steps}"
    # This loss is balanced over the rows of one micro-step, so only equal numbers of micro-steps are comparable.
    reference = f"{micro_steps} micro-steps" if base.moe.aux_loss == "global_batch" else "one rank"
    return Case(layout, config, reference, micro_steps, name)


def _reference_config(base: Config, case: Case) -> Config:
    rows = base.train.global_batch_size
    if base.moe.aux_loss == "global_batch":
        micro_batch_size = rows // case.accumulation
    else:
        micro_batch_size = gcd(rows, case.config.train.micro_batch_size)
    parallel = replace(base.parallel, **Layout().degrees)
    return replace(base, parallel=parallel, train=replace(base.train, micro_batch_size=micro_batch_size))


def _validated(config: Config, world_size: int, where: str, violations: list[str]) -> Config | None:
    try:
        return validate(config, world_size=world_size, local_world_size=world_size)
    except ConfigError as error:
        violations += [f"{violation} (layout {where})" for violation in error.violations]
        return None


def exact_case(name: str, reference: Config) -> Case | None:
    """Return the reference in fp32, to be compared with itself, or None where it is in fp32 already.

    Args:
        name: The reference's name.
        reference: Its configuration.
    """
    if reference.precision.mode == "fp32":
        return None
    precision = replace(reference.precision, mode="fp32", attention="bf16")
    config = replace(reference, precision=precision, experts=replace(reference.experts, backend=AUTO))
    return Case(Layout(), config, name, 0, f"reference in fp32 ({name})")


def moved_case(name: str, reference: Config) -> Case | None:
    """Return the reference once more, for weights moved by their last place, or None where it is not in fp32.

    Args:
        name: The reference's name.
        reference: Its configuration.
    """
    if reference.precision.mode != "fp32":
        return None
    return Case(Layout(), reference, name, 0, f"reference with its weights moved by their last place ({name})")


def on_device(plan: Plan, device: str) -> Plan:
    """Return the plan with every configuration for one device, checked again.

    Args:
        plan: From `make_plan`.
        device: `cpu` or `cuda`.

    Raises:
        ConfigError: A mode or backend that the device does not have.
    """
    violations: list[str] = []

    def moved(config: Config, world_size: int, where: str) -> Config:
        return _validated(replace(config, device=device), world_size, where, violations) or config  # pyright: ignore

    references = {name: moved(config, 1, "reference") for name, config in plan.references.items()}
    cases = tuple(
        replace(case, config=moved(case.config, case.layout.world_size, str(case.layout))) for case in plan.cases
    )
    if violations:
        raise ConfigError(list(dict.fromkeys(violations)))
    return replace(plan, references=references, cases=cases)


def with_data(plan: Plan, path: str) -> Plan:
    """Return the plan with another file of sequences, which is FASTA."""

    def given(config: Config) -> Config:
        return replace(config, data=replace(config.data, path=path, separate_documents=True))

    references = {name: given(config) for name, config in plan.references.items()}
    return replace(plan, references=references, cases=tuple(replace(c, config=given(c.config)) for c in plan.cases))


def choose_device(plan: Plan, num_gpus: int) -> str:
    """Return `cuda` where there is a GPU for each rank of the largest layout, or where the configuration wants it."""
    wanted = plan.cases[0].config.device
    if wanted != AUTO:
        return wanted
    return "cuda" if num_gpus >= plan.largest_world else "cpu"


def by_world_size(cases: Iterable[Case]) -> Iterator[tuple[int, list[Case]]]:
    """Yield the cases of each number of ranks, the fewest first."""
    groups: dict[int, list[Case]] = {}
    for case in cases:
        groups.setdefault(case.layout.world_size, []).append(case)
    yield from sorted(groups.items())
