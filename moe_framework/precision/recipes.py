"""Transformer Engine's quantization recipes, by the framework's names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TeRecipe:
    """How Transformer Engine quantizes the factors of a product.

    Attributes:
        row_alignment: Each expert's number of rows must be a multiple of this.
        width_alignment: D and F must be multiples of this.
        make: Makes the recipe object; called inside the layer, because importing Transformer Engine takes seconds.
        needs_module: Whether only Transformer Engine's modules, not its operations, compute it.
        fusible: Whether Transformer Engine has one fused operation for the whole MLP in this format, on Blackwell.
    """

    row_alignment: int
    width_alignment: int
    make: Callable[[], Any]
    needs_module: bool = False
    fusible: bool = False


def _make(name: str, **options) -> Callable[[], Any]:
    def make():
        from transformer_engine.common import recipe  # pyright: ignore[reportMissingImports]

        return getattr(recipe, name)(**options)

    return make


def _make_mxfp8():
    from transformer_engine.common import recipe  # pyright: ignore[reportMissingImports]

    # E4M3 in both directions: the fused operation reads gradients as E4M3 and stays away from any other format.
    # Backward from the quantized factors, so that the bf16 weights can be freed before it.
    return recipe.MXFP8BlockScaling(fp8_format=recipe.Format.E4M3, backward_override=None)


RECIPES = {
    "fp8_current": TeRecipe(16, 16, _make("Float8CurrentScaling")),
    # The amax history stays on its rank: experts differ between ranks, so a maximum over ranks says nothing.
    "fp8_delayed": TeRecipe(16, 16, _make("DelayedScaling", reduce_amax=False)),
    "fp8_block": TeRecipe(128, 128, _make("Float8BlockScaling"), needs_module=True),
    "mxfp8": TeRecipe(32, 32, _make_mxfp8, fusible=True),
    "nvfp4": TeRecipe(128, 32, _make("NVFP4BlockScaling")),
}
