"""The single rank that every layout is compared with: run once, and written to files."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_framework.config.schema import Config
from tools.parity.plan import Options
from tools.parity.probe import probe_gate
from tools.parity.progress import Steps
from tools.parity.routing import Recorder
from tools.parity.tensors import MOMENTS, digests, moments, named_parameters, whole
from tools.parity.training import Figures, build, train

TENSORS = ("gradients", "parameters", *MOMENTS)


@dataclass(frozen=True)
class Reference:
    """What one rank computed, read from its files when needed.

    Attributes:
        folder: Its files.
        figures: Its numbers.
        initial: Digests of its parameters before the first step.
        experts_backend: What computed its experts.
        function: Difference of their function from plain torch; see `probe`.
    """

    folder: Path
    figures: Figures
    initial: dict[str, str]
    experts_backend: str
    function: float

    @property
    def routing(self) -> Path:
        """File of the recorded choices."""
        return self.folder / "routing.pt"

    def tensors(self, kind: str) -> dict[str, Tensor]:
        """Whole tensors by name, mapped from the file; `kind` is one of `TENSORS`."""
        return torch.load(self.folder / f"{kind}.pt", mmap=True, weights_only=True)


def run_reference(
    group: dist.ProcessGroup, device: torch.device, config: Config, options: Options, folder: Path, steps: Steps
) -> None:
    """Train on one rank and write everything that the layouts are compared with.

    Args:
        group: Of one rank.
        device: Its device.
        config: Validated, for one rank.
        options: From the command line.
        folder: Exists; the files are written there.
        steps: Counts the steps for the progress lines.
    """
    assert group.size() == 1, "the reference is one rank"
    run = build(config, device)
    initial = digests(named_parameters(run.model))
    sizes = config.model
    shape = (options.steps, sizes.num_layers, config.train.global_batch_size, config.data.seq_length)
    recorder = Recorder(run.model, shape, sizes.top_k)
    figures = train(
        run,
        options,
        begin=recorder.begin,
        at_gradients=lambda gradients: _save(gradients, folder / "gradients.pt"),
        advance=lambda _: steps.advance("reference"),
    )
    recorder.save(folder / "routing.pt")
    _save(named_parameters(run.model), folder / "parameters.pt")
    for key in MOMENTS:
        _save(moments(run.model, run.optimizer, key), folder / f"{key}.pt")
    figures_json = asdict(figures) | {"rows": [[[*row, n] for row, n in rows.items()] for rows in figures.rows]}
    content: dict[str, Any] = {
        "figures": figures_json,
        "initial": initial,
        "experts_backend": run.experts_backend.name,
        "function": probe_gate(run).stored,
    }
    (folder / "reference.json").write_text(json.dumps(content))


def read_reference(folder: Path) -> Reference:
    """Read what `run_reference` wrote."""
    content = json.loads((folder / "reference.json").read_text())
    figures = Figures(**content["figures"])
    figures.rows = [{(sample, digest): n for sample, digest, n in rows} for rows in content["figures"]["rows"]]
    figures.tokens = [tuple(counts) for counts in content["figures"]["tokens"]]
    return Reference(folder, figures, content["initial"], content["experts_backend"], content["function"])


def _save(tensors: Iterator[tuple[str, Tensor]], path: Path) -> None:
    # Clones: views would be saved with the whole memory that they are in.
    torch.save({name: whole(tensor).clone() for name, tensor in tensors}, path)
