"""Linear layers whose products are quantized, by torchao; the names and shapes of their weights do not change.

Source: torchao 0.18, `float8` and the emulated kernels of `prototype.moe_training`.
"""

import torch
from torch import Tensor, nn

from moe_framework.errors import DependencyError
from moe_framework.precision.modes import EMULATED


def quantize_linears(parent: nn.Module, mode: str) -> None:
    """Replace each linear layer directly below a module by a quantized one.

    Args:
        parent: Its linear layers have no bias; may be on the meta device.
        mode: One whose `Mode.attention` is set: `mxfp8_emulated`, or FP8 with a scale per tensor, taken from the
            tensor itself whatever the experts do.

    Raises:
        DependencyError: torchao cannot be imported.
    """
    for name, linear in list(parent.named_children()):
        if isinstance(linear, nn.Linear):
            setattr(parent, name, EmulatedMxfp8Linear(linear) if mode == EMULATED else _fp8_linear(linear))


def _fp8_linear(linear: nn.Linear) -> nn.Linear:
    try:
        from torchao.float8.float8_linear import Float8Linear
    except ImportError as error:
        raise _missing(error) from error
    return Float8Linear.from_float(linear)


class EmulatedMxfp8Linear(nn.Linear):
    """A linear layer with MXFP8's rounding of both factors of its three products, which are then computed in bf16.

    Args:
        linear: The layer whose weight it takes.

    Raises:
        DependencyError: torchao cannot be imported.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        try:
            from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
            from torchao.prototype.mx_formats.config import ScaleCalculationMode
            from torchao.quantization.quantize_.common.kernel_preference import KernelPreference
        except ImportError as error:
            raise _missing(error) from error
        self._product = _to_mxfp8_then_scaled_mm
        self._options = (KernelPreference.EMULATED, ScaleCalculationMode.RCEIL)

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer to [..., in]; the number of rows, in and out must be multiples of 32."""
        rows = input.flatten(0, -2)
        padding = -rows.shape[0] % 32
        if padding:
            # Whole blocks along the rows too, for the weight's gradient; zeros change none of its sums.
            rows = torch.cat([rows, rows.new_zeros(padding, rows.shape[1])])
        out = self._product(rows, self.weight, *self._options)
        return out[: out.shape[0] - padding].unflatten(0, input.shape[:-1])


def _missing(error: ImportError) -> DependencyError:
    return DependencyError(
        f"precision.attention=quantized needs torchao 0.18, which failed to import ({error}). Install '.[mx]', or set "
        "precision.attention=bf16."
    )
