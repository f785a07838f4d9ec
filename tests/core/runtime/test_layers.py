"""The operators around a replica's sums: what they give, and whose memory they leave alone."""

from __future__ import annotations

import torch

from ntp_core.runtime.comm import Comm
from ntp_core.runtime.layers import (
    TensorParallelGroup,
    copy_to_group,
    sum_in_place,
    sum_over_group,
    vocab_parallel_loss_sum,
)
from ntp_core.runtime.modules.wrap import InputCopies


class Doubling(TensorParallelGroup):
    """Sums as if another rank had brought the same."""

    def __init__(self) -> None:
        super().__init__(Comm(0, 1), (0,))
        self.sums = 0

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place, as the real one."""
        self.sums += 1
        return tensor.mul_(2)


def test_copy_sums_a_gradient_and_leaves_that_of_others_alone() -> None:
    """An addition hands one tensor to both its inputs as their gradient."""
    x, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    early = other * 1  # its backward comes after that of the copy
    copy = copy_to_group(x, Doubling())
    assert torch.equal(copy, x)
    (copy + early).backward(torch.full((3,), 5.0))
    assert torch.equal(torch.full((3,), 10.0), x.grad)
    assert torch.equal(torch.full((3,), 5.0), other.grad)


def test_sum_leaves_its_argument_alone_and_passes_the_gradient_on() -> None:
    """Others may read what was summed."""
    x = torch.ones(3, requires_grad=True)
    y = x * 1
    total = sum_over_group(y, Doubling())
    assert torch.equal(torch.full((3,), 2.0), total)
    assert torch.equal(torch.ones(3), y)
    total.backward(torch.full((3,), 5.0))
    assert torch.equal(torch.full((3,), 5.0), x.grad)


def test_sum_in_place_uses_its_argument_where_it_can() -> None:
    """Contiguous memory is overwritten; other memory is copied first."""
    x = torch.ones(2, 3, requires_grad=True)
    y = x * 1
    assert sum_in_place(y, Doubling()).data_ptr() == y.data_ptr()
    turned = (x * 1).t()
    assert torch.equal(torch.full((3, 2), 2.0), sum_in_place(turned, Doubling()))
    assert torch.equal(torch.ones(3, 2), turned)


def test_copies_of_one_input_share_a_sum_whoever_holds_them() -> None:
    """Three readers of one tensor, two of another; without gradients there is nothing to sum."""
    group = Doubling()
    copies = InputCopies(group)
    weights = [torch.ones(4, 4, requires_grad=True) for _ in range(5)]
    first = torch.ones(2, 3, 4, requires_grad=True) * 1
    second = torch.full((2, 3, 4), 2.0, requires_grad=True) * 1
    sources = [first, first, first, second, second]
    out = [
        torch.nn.functional.linear(copies.of(x), w) for x, w in zip(sources, weights, strict=True)
    ]
    assert [float(o.detach().mean()) for o in out] == [4, 4, 4, 8, 8]
    last = copies.of(second)
    torch.stack(out).sum().backward()
    assert group.sums == 2
    with torch.no_grad():
        assert copies.of(first) is first
    assert copies.of(second) is not last, "backward lets go of the copy, and of its graph"


def test_loss_of_any_type_is_that_of_the_whole_vocabulary() -> None:
    """A rank's buffers have the type of its logits, also where it holds no vocab row."""
    alone = TensorParallelGroup(Comm(0, 1), (0,))
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(1))
    targets = torch.tensor([0, 6, 3, 3, 1])
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        right = torch.nn.functional.cross_entropy(
            logits.to(dtype).double(), targets, reduction="sum"
        )
        found = vocab_parallel_loss_sum(logits.to(dtype), targets, alone)
        rel = 2e-2 if dtype == torch.bfloat16 else 1e-6
        torch.testing.assert_close(found, right, rtol=rel, atol=0)
    seen: list[torch.dtype] = []

    class Noting(Comm):
        def all_reduce(self, tensor: torch.Tensor, *_: object) -> torch.Tensor:
            seen.append(tensor.dtype)
            return tensor

    empty = torch.zeros(5, 0, dtype=torch.bfloat16)
    group = TensorParallelGroup(Noting(0, 1), (0,))
    vocab_parallel_loss_sum(empty, torch.full((5,), -1), group)
    assert seen == [torch.bfloat16] * 2
