"""Say what this machine can train with, and what a configuration would violate here.

python tools/doctor.py --config-name L0_sanity
"""

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moe_framework.config.schema import Config
    from tools.diagnosis.report import Diagnosis

CONFIG_DIR = Path(__file__).resolve().parents[1] / "configs"
VIOLATIONS_EXIT_CODE = 1


def main(argv: Sequence[str]) -> int:
    """Look, print the report, and write it as JSON where that was asked for.

    Args:
        argv: The arguments after the program's name.

    Returns:
        The exit code: 0; 1 if the configuration violates anything here; 2 if it cannot be composed.

    Raises:
        SystemExit: The command line cannot be parsed, or asks for help.
    """
    from moe_framework.errors import MoeFrameworkError
    from tools.command_line import show_error

    # Said whenever torch is imported, about a package that nvidia-resiliency-ext 0.4 brings.
    warnings.filterwarnings("ignore", message="The pynvml package is deprecated", category=FutureWarning)
    arguments = parse(argv)
    try:
        config = _load(arguments)
        # torch takes seconds to import, so it comes after everything that can be wrong with the command line.
        from tools.diagnosis import report

        found = diagnose(config, arguments)
        print(report.to_text(found))
        if arguments.json is not None:
            report.write_json(found, arguments.json)
    except MoeFrameworkError as error:
        return show_error(error)
    return VIOLATIONS_EXIT_CODE if found.configuration and found.configuration.violations else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line.

    Raises:
        SystemExit: It cannot be parsed, or asks for help.
    """
    from tools.command_line import positive

    parser = argparse.ArgumentParser(prog="doctor.py", description="Say what this machine can train with.")
    parser.add_argument("-cn", "--config-name", metavar="NAME", help="check this configuration too")
    parser.add_argument("-cd", "--config-dir", metavar="DIR", help="a folder of your own beside configs/")
    parser.add_argument("--ranks", type=positive, help="ranks on this host (default: what the configuration needs)")
    parser.add_argument("--measure", action="store_true", help="time the expert backends, as training does")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="beats the configuration")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.overrides and arguments.config_name is None:
        parser.error(f"{arguments.overrides[0]} overrides nothing: --config-name is missing")
    return arguments


def diagnose(config: "Config | None", arguments: argparse.Namespace) -> "Diagnosis":
    """Look at the machine, and at the configuration on it.

    Args:
        config: Composed, not validated; None to look at the machine alone.
        arguments: From `parse`.

    Returns:
        The findings.
    """
    import torch

    from moe_framework.config.schema import Config
    from moe_framework.precision.policy import precision_policy
    from tools.diagnosis import backends, configuration, machine, precision, report, software

    installed, host = software.examine_software(), machine.examine_machine()
    te_problem = installed.problem("transformer-engine")
    modes = precision.examine_modes(
        host.capability,
        host.device_name,
        te_problem=te_problem,
        emulation_problem=installed.problem("torchao"),
        te_problems=installed.te_problems,
    )
    if config is None:
        shown = Config()
        fusion = backends.examine_fusion(shown, "mxfp8", host.capability, torch.device("cuda"))
        return report.Diagnosis(host, installed, modes, fusion)

    on_gpu = configuration.uses_gpu(config, host)
    device = torch.device("cuda", 0) if on_gpu else torch.device("cpu")
    ranks = arguments.ranks or configuration.choose_ranks(config, host)
    valid, violations = configuration.validate_here(config, host, ranks)
    experts, attention = None, ()
    mode = precision.resolved_here(config.precision.mode, host.capability if on_gpu else None)
    if valid is not None and mode is not None and not configuration.is_planned(config):
        experts = backends.examine_experts(valid, device, measure=arguments.measure, te_problem=te_problem)
        attention = backends.examine_attention(valid, device, precision_policy(mode, device))
        violations += [] if experts.chosen or experts.reason in violations else [experts.reason]
        violations += configuration.torchao_violations(config, installed.problem("torchao")) if experts.chosen else []
    fusion = backends.examine_fusion(config, mode, host.capability if on_gpu else None, device)
    finding = configuration.ConfigurationFinding(
        arguments.config_name, ranks, configuration.describe(valid, host), tuple(violations)
    )
    return report.Diagnosis(host, installed, modes, fusion, finding, experts, attention)


def _load(arguments: argparse.Namespace) -> "Config | None":
    from moe_framework.config.load import load_config

    if arguments.config_name is None:
        return None
    return load_config(arguments.config_name, arguments.overrides, CONFIG_DIR, arguments.config_dir)


if __name__ == "__main__":
    # Started as a file, Python looks for modules in tools/ and not in the repository's root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    sys.exit(main(sys.argv[1:]))
