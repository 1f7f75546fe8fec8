"""The reference's choice of experts, recorded by global sample and position, and replayed in the layouts.

Rounding differs between layouts. Where a token's K-th and (K+1)-th score nearly tie, it may choose differently, and
everything after it would differ too, with nothing being wrong. So the layouts take the reference's choices, and
each choice that would have been different is compared with its gap: beyond rounding it is an error.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from moe_framework.data.loader import Batch
from moe_framework.model.block import Block
from moe_framework.model.decoder import Decoder
from moe_framework.moe.layer import TokenLayout
from moe_framework.moe.router import Routing

NOT_ROUTED = -1


class Place(NamedTuple):
    """Where a token is, whatever the layout.

    Attributes:
        step: Optimizer step, from 1.
        layer: Block.
        sample: Row of the global batch.
        position: Position in the row.
    """

    step: int
    layer: int
    sample: int
    position: int


@dataclass
class Differences:
    """Choices that a layout would have made otherwise.

    Attributes:
        choices: Choices of all tokens and layers that were compared.
        differing: How many differed.
        largest_gap: Largest gap of those, relative to the layer's scores (root mean square).
        where: Its place; None where none differed.
    """

    choices: int = 0
    differing: int = 0
    largest_gap: float = 0.0
    where: Place | None = None

    def add(self, other: "Differences") -> None:
        """Add those of another rank."""
        self.choices += other.choices
        self.differing += other.differing
        if other.where is not None and (self.where is None or other.largest_gap > self.largest_gap):
            self.largest_gap, self.where = other.largest_gap, other.where


class _Watch:
    """Knows, inside each router, which tokens of the global batch it is asked about.

    Args:
        model: The parallelised decoder; its routers are wrapped for good.
        tp_rank: This rank's place among those that share each row's positions.
    """

    def __init__(self, model: Decoder, tp_rank: int):
        self._tp_rank = tp_rank
        self._samples: list[Tensor] = []
        self._step, self._micro_step = 0, -1
        # Only the forward pass of the whole model counts: activation checkpointing runs blocks a second time.
        model.register_forward_pre_hook(self._next_micro_batch)
        for layer, module in enumerate(model.layers):
            block = cast(Block, module)
            place: list[Tensor] = []
            block.moe.register_forward_pre_hook(partial(self._locate, place))
            router = block.moe.router
            router.forward = partial(self._route, layer, router.forward, place)

    def begin(self, step: int, batches: Sequence[Batch], first_sample: int) -> None:
        """Announce the micro-batches of a step, in the order in which the model will take them.

        Args:
            step: Optimizer step, from 1.
            batches: This rank's micro-batches.
            first_sample: Global sample index of the step's first row.
        """
        self._step, self._micro_step = step, -1
        self._samples = [torch.tensor(batch.sample_ids) - first_sample for batch in batches]

    def _next_micro_batch(self, *_: object) -> None:
        self._micro_step += 1

    def _locate(self, place: list[Tensor], _module: nn.Module, inputs: tuple[Tensor, TokenLayout]) -> None:
        x_BSD, layout = inputs
        num_rows, length = x_BSD.shape[:2]
        index_T = layout.valid_index_T
        index_T = torch.arange(num_rows * length) if index_T is None else index_T.cpu()
        place[:] = [self._samples[self._micro_step][index_T // length], index_T % length + self._tp_rank * length]

    def _route(self, layer: int, forward: Callable[[Tensor], Routing], place: list[Tensor], x_TD: Tensor) -> Routing:
        return self._decide(layer, forward(x_TD), *place)

    def _decide(self, layer: int, routing: Routing, sample_T: Tensor, position_T: Tensor) -> Routing:
        raise NotImplementedError


class Recorder(_Watch):
    """Keeps the choices of all steps and how near they were to another.

    Args:
        model: The decoder on one rank.
        shape: Steps, layers, rows of the global batch and positions of a row.
        top_k: Experts per token.
    """

    def __init__(self, model: Decoder, shape: tuple[int, int, int, int], top_k: int):
        super().__init__(model, 0)
        self._experts = torch.full((*shape, top_k), NOT_ROUTED, dtype=torch.int16)
        self._gaps = torch.full(shape, torch.inf, dtype=torch.float32)

    def save(self, path: Path) -> None:
        """Write the choices and gaps."""
        torch.save({"experts": self._experts, "gaps": self._gaps}, path)

    @torch.no_grad()
    def _decide(self, layer: int, routing: Routing, sample_T: Tensor, position_T: Tensor) -> Routing:
        where = (self._step - 1, layer, sample_T, position_T)
        self._experts[where] = routing.experts_TK.cpu().to(torch.int16)
        top_k, num_experts = routing.experts_TK.shape[1], routing.logits_TE.shape[1]
        if top_k < num_experts:
            # Not topk, whose results activation checkpointing counts.
            scores_TE = routing.logits_TE.sort(dim=-1, descending=True).values
            gaps_T = (scores_TE[:, top_k - 1] - scores_TE[:, top_k]) / _scale(routing.logits_TE)
            self._gaps[where] = gaps_T.float().cpu()
        return routing


class Replayer(_Watch):
    """Gives every router the reference's choices, and compares its own with them.

    Args:
        model: The parallelised decoder.
        tp_rank: This rank's place among those that share each row's positions.
        path: What a `Recorder` saved.
    """

    def __init__(self, model: Decoder, tp_rank: int, path: Path):
        super().__init__(model, tp_rank)
        recorded = torch.load(path, mmap=True, weights_only=True)
        self._experts, self._gaps = recorded["experts"], recorded["gaps"]
        self._counted: set[tuple[int, int, int]] = set()
        self.found = Differences()

    def _decide(self, layer: int, routing: Routing, sample_T: Tensor, position_T: Tensor) -> Routing:
        where = (self._step - 1, layer, sample_T, position_T)
        recorded_TK = self._experts[where]
        # A token that the reference did not route is an error elsewhere, which the counts of tokens show.
        missing = recorded_TK == NOT_ROUTED
        experts_TK = recorded_TK.to(routing.experts_TK)
        if missing.any():
            experts_TK = torch.where(missing.to(experts_TK.device), routing.experts_TK, experts_TK)
        call = (self._step, self._micro_step, layer)
        if call not in self._counted:
            self._counted.add(call)
            with torch.no_grad():
                self._compare(layer, routing, experts_TK, sample_T, position_T)
        probs_TK = torch.softmax(routing.logits_TE.gather(1, experts_TK), dim=-1)
        return Routing(probs_TK, experts_TK, routing.logits_TE)

    def _compare(self, layer: int, routing: Routing, experts_TK: Tensor, sample_T: Tensor, position_T: Tensor) -> None:
        self.found.choices += len(sample_T)
        own, recorded = routing.experts_TK.sort(dim=-1).values, experts_TK.sort(dim=-1).values
        differs_T = (own != recorded).any(dim=-1).cpu()
        if not differs_T.any():
            return
        logits_TE = routing.logits_TE
        # Neither side may have been sure of its choice.
        own_gaps_T = logits_TE.gather(1, routing.experts_TK).amin(-1) - logits_TE.gather(1, experts_TK).amin(-1)
        own_gaps_T = (own_gaps_T / _scale(logits_TE)).float().cpu()
        gaps_T = torch.maximum(own_gaps_T, self._gaps[self._step - 1, layer, sample_T, position_T])[differs_T]
        worst = int(gaps_T.argmax())
        place = Place(self._step, layer, int(sample_T[differs_T][worst]), int(position_T[differs_T][worst]))
        self.found.add(Differences(0, int(differs_T.sum()), float(gaps_T[worst]), place))


def _scale(logits_TE: Tensor) -> Tensor:
    return logits_TE.square().mean().sqrt().clamp_min(torch.finfo(torch.float32).tiny)
