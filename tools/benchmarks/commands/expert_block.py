"""The arguments of `expert-block`, and its run: backends and dispatchers at free sizes, or backends at `--shape`."""

import argparse

from tools.benchmarks.commands.common import Subcommands, add_common, add_markdown, write_outputs
from tools.command_line import positive

DEFAULT_TOKENS = 2048

# T, D, F, E, K of Mixtral-8x7B's and Qwen3-30B-A3B's experts on four rows of 4,096 tokens.
SHAPES = {"mixtral": (16384, 4096, 14336, 8, 2), "fine": (16384, 2048, 768, 128, 8)}


def add(commands: Subcommands) -> None:
    """Add the subcommand."""
    text = "grouped_mm against loop, all-to-all dispatch against all-gather; with --shape, every backend and its rate"
    command = commands.add_parser("expert-block", help=text, description=text)
    command.set_defaults(run=run)
    add_common(command)
    add_markdown(command)
    command.add_argument(
        "--shape", choices=SHAPES, nargs="+", help="time every backend, Transformer Engine and dense products at these"
    )
    command.add_argument("--contenders", nargs="+", metavar="NAME:MODE", help="with --shape (default: all)")
    command.add_argument("--threads", type=positive, help="torch's threads outside dispatch (default: torch's choice)")
    command.add_argument(
        "--tokens",
        type=positive,
        help=f"tokens T, of each rank in the dispatch part (default: {DEFAULT_TOKENS}, or the shape's)",
    )
    command.add_argument("--hidden-size", type=positive, default=256, help="model width D (default: %(default)s)")
    command.add_argument(
        "--intermediate-size", type=positive, default=512, help="expert width F (default: %(default)s)"
    )
    command.add_argument("--top-k", type=positive, default=2, help="experts per token K (default: %(default)s)")
    command.add_argument(
        "--num-experts",
        type=positive,
        nargs="+",
        default=[8, 64],
        help="experts E; dispatch takes the first (default: 8 64)",
    )
    command.add_argument("--ep", type=positive, nargs="+", help="ranks of dispatch (default: 2 4, or all GPUs)")
    command.add_argument(
        "--dtype", choices=("fp32", "bf16"), nargs="+", help="dtypes (default: fp32 bf16 on cpu, bf16 on cuda)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Run `expert-block`: print the report, write the files that were asked for.

    Returns:
        The exit code.

    Raises:
        ConfigError: Sizes that don't fit each other, or a device or folder that is missing.
        DependencyError: A chart is wanted and matplotlib is missing.
    """
    # torch takes seconds to import: --help and mistyped options shall not wait for it.
    from tools.benchmarks import expert_block, report

    report.check_outputs(arguments.json, arguments.chart)
    if arguments.shape is not None:
        return _run_shapes(arguments)
    options = expert_block.Options(
        device=arguments.device,
        tokens=arguments.tokens or DEFAULT_TOKENS,
        hidden_size=arguments.hidden_size,
        intermediate_size=arguments.intermediate_size,
        top_k=arguments.top_k,
        num_experts=tuple(arguments.num_experts),
        ep=None if arguments.ep is None else tuple(arguments.ep),
        dtypes=None if arguments.dtype is None else tuple(arguments.dtype),
        warmup=arguments.warmup,
        repetitions=arguments.repetitions,
        threads=arguments.threads,
        seed=arguments.seed,
    )
    found = expert_block.run(options)
    write_outputs(arguments, found, report)
    return 0


def _run_shapes(arguments: argparse.Namespace) -> int:
    from tools.benchmarks import expert_rates, expert_rates_report
    from tools.benchmarks.experts import ExpertsCase

    cases = {}
    for name in arguments.shape:
        tokens, width, inner, num_experts, top_k = SHAPES[name]
        cases[name] = ExpertsCase(
            num_tokens=arguments.tokens or tokens,
            hidden_size=width,
            intermediate_size=inner,
            num_experts=num_experts,
            top_k=top_k,
            dtype="bf16",
            seed=arguments.seed,
        )
    found = expert_rates.run(
        expert_rates.RatesOptions(
            device=arguments.device,
            cases=cases,
            contenders=tuple(arguments.contenders or expert_rates.CONTENDERS),
            warmup=arguments.warmup,
            repetitions=arguments.repetitions,
        )
    )
    write_outputs(arguments, found, expert_rates_report)
    return 0
