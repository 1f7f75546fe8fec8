"""The interface of every token dispatcher.

A dispatcher holds no state of a batch: what `combine` needs travels in the handle that `dispatch` returned.
"""

from typing import Any, NamedTuple, Protocol

from torch import Tensor


class Dispatched(NamedTuple):
    """Token copies on the rank of their expert, the rows of its first expert first.

    Attributes:
        rows_RD: [R, D]; R may be 0.
        probs_R: [R] float32; the routing weight of each row.
        tokens_per_expert: [e] int64 on the rows' device; sums to R.
        handle: Opaque; `combine` of the same dispatcher takes it.
    """

    rows_RD: Tensor
    probs_R: Tensor
    tokens_per_expert: Tensor
    handle: Any


class TokenDispatcher(Protocol):
    """Carries tokens to their experts and their results back; differentiable, dropless."""

    def dispatch(self, x_TD: Tensor, probs_TK: Tensor, experts_TK: Tensor) -> Dispatched:
        """Send each token to its K experts.

        Args:
            x_TD: [T, D]; T may be 0.
            probs_TK: [T, K] float32; routing weights.
            experts_TK: [T, K] int64; global expert numbers.

        Returns:
            The rows for this rank's experts.
        """
        ...

    def combine(self, rows_RD: Tensor, handle: Any) -> Tensor:
        """Bring the experts' results back and sum them per token.

        Args:
            rows_RD: [R, D]; one result for each dispatched row, already weighted.
            handle: From `dispatch`.

        Returns:
            [T, D].
        """
        ...
