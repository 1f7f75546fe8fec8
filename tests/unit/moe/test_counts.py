import torch

from moe_framework.moe.counts import HostCounts


def test_the_host_reads_the_attached_values_and_not_the_tensor():
    counts = torch.tensor([3, 0, 2])
    known = HostCounts.of(counts, [7, 8, 9])
    assert known.tolist() == [7, 8, 9]
    assert known.data_ptr() == counts.data_ptr()
    assert HostCounts.of(known) is known
    assert HostCounts.of(counts).tolist() == [3, 0, 2]


def test_results_of_operations_are_plain_tensors():
    known = HostCounts.of(torch.tensor([3, 0, 2]))
    for result in (known + 1, known.cumsum(0), known[:2], known.to(torch.int32), known.view(3, 1)):
        assert type(result) is torch.Tensor
    assert (known + 1).tolist() == [4, 1, 3]


def test_the_values_survive_being_saved_for_backward():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, counts):
            ctx.save_for_backward(counts)
            return x * 2

        @staticmethod
        def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
            seen.append(ctx.saved_tensors[0])
            return grad * 2, None

    seen: list[torch.Tensor] = []
    known = HostCounts.of(torch.tensor([1, 2]), [5, 6])
    Double.apply(torch.ones(2, requires_grad=True), known).sum().backward()  # pyright: ignore
    assert [saved.tolist() for saved in seen] == [[5, 6]]
