"""One decoder block: attention, then experts, each on a normalised residual stream."""

from torch import Tensor, nn

from moe_framework.model.attention import Attention, AttentionContext
from moe_framework.moe.balancing import RouterStats
from moe_framework.moe.layer import MoELayer, TokenLayout


class Block(nn.Module):
    """x + attention(norm(x)), then x + moe(norm(x)).

    Args:
        hidden_size: D.
        norm_eps: Added to the mean square in RMSNorm.
        attention: The attention layer.
        moe: The MoE layer.
    """

    def __init__(self, *, hidden_size: int, norm_eps: float, attention: Attention, moe: MoELayer):
        super().__init__()
        self.attention_norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.attention = attention
        self.moe_norm = nn.RMSNorm(hidden_size, eps=norm_eps)
        self.moe = moe

    def forward(self, x_BSD: Tensor, context: AttentionContext, layout: TokenLayout) -> tuple[Tensor, RouterStats]:
        """Apply the block.

        Args:
            x_BSD: [B, S, D].
            context: Shared by all attention layers.
            layout: Where the tokens are.

        Returns:
            [B, S, D], and the router's losses and statistics.
        """
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), context)
        y_BSD, stats = self.moe(self.moe_norm(x_BSD), layout)
        return x_BSD + y_BSD, stats
