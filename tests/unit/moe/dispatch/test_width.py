import torch
import torch.distributed as dist

from moe_framework.moe.counts import HostCounts
from moe_framework.moe.dispatch.local import LocalDispatcher
from moe_framework.moe.dispatch.width import WidthDispatcher
from tests.helpers.one_rank import one_rank


def test_the_host_knows_the_counts_from_its_one_wait():
    experts_TK = torch.tensor([[0, 2], [2, 3], [0, 2]])
    with one_rank():
        assert dist.group.WORLD is not None
        dispatcher = WidthDispatcher(LocalDispatcher(num_experts=4), group=dist.group.WORLD)
        counts = dispatcher.dispatch(torch.randn(3, 6), torch.rand(3, 2), experts_TK).tokens_per_expert
    assert isinstance(counts, HostCounts)
    assert counts.tolist() == (counts + 0).tolist() == [2, 0, 3, 1]
