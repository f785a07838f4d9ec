"""Uneven tensor-parallel layers on plain tensors.

Legend: B batch, T positions, D model width, and a dim named after what it counts on this rank only
(O outputs, I inputs, V vocab rows), any of which may be 0.

The two operators are those of Megatron-LM (arXiv 1909.08053, section 3): `copy_to_group` is the
identity forward and sums gradients backward; `sum_over_group` sums forward and is the identity
backward.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ntp_core.runtime.comm import Comm, Ranks


class TensorParallelGroup:
    """The ranks of one replica, as layers see them. `ranks` changes with the plan."""

    def __init__(self, comm: Comm, ranks: Ranks) -> None:
        self.comm = comm
        self.ranks = ranks

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over the replica's ranks."""
        return self.comm.all_reduce(tensor, self.ranks)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.group.sum(grads[0].contiguous().clone()), None


class _SumInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
        if not x.is_contiguous():
            return group.sum(x.contiguous())
        ctx.mark_dirty(x)
        return group.sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
        return group.sum(x.contiguous().clone())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None


def copy_to_group(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Identity; backward sums the gradient over the group."""
    return cast(torch.Tensor, _Copy.apply(x, group))  # type: ignore[no-untyped-call]


def sum_over_group(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """Sum over the group; backward passes the gradient on."""
    return cast(torch.Tensor, _Sum.apply(x, group))  # type: ignore[no-untyped-call]


def sum_in_place(x: torch.Tensor, group: TensorParallelGroup) -> torch.Tensor:
    """`sum_over_group` that overwrites `x`, and so saves a copy.

    Only for a tensor that nobody else reads, fresh from the operation that made it. Where that
    operation needs its result for backward, autograd raises.
    """
    return cast(torch.Tensor, _SumInPlace.apply(x, group))  # type: ignore[no-untyped-call]


class ColumnParallel(nn.Module):
    """Linear without bias whose outputs are cut: weight_OI holds this rank's rows."""

    def __init__(self, rows: int, in_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, in_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I] -> [..., O of this rank]; `x` must come from `copy_to_group`."""
        return F.linear(x, self.weight)


class RowParallel(nn.Module):
    """Linear without bias whose inputs are cut: weight_OI holds this rank's columns."""

    def __init__(self, out_features: int, cols: int, group: TensorParallelGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, cols))
        self._group = group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., I of this rank] -> [..., O], summed over the replica."""
        return sum_in_place(F.linear(x, self.weight), self._group)


class VocabParallelEmbedding(nn.Module):
    """Embedding whose vocab rows are cut, in any order and number.

    `row_of_token` maps a token to this rank's row, or -1 when another rank holds it.
    """

    row_of_token: torch.Tensor

    def __init__(
        self, row_of_token: torch.Tensor, rows: int, width: int, group: TensorParallelGroup
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width))
        self.register_buffer("row_of_token", row_of_token, persistent=False)
        self._group = group

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """[B, T] token ids -> [B, T, D]."""
        rows = self.row_of_token[tokens_BT]
        mine = rows >= 0
        if self.weight.shape[0] == 0:  # a rank without vocab rows still takes part in the sum
            local = self.weight.sum() * self.weight.new_zeros(*rows.shape, self.weight.shape[1])
        else:
            local = F.embedding(rows.clamp(min=0), self.weight) * mine.unsqueeze(-1)
        return sum_in_place(local, self._group)


class _VocabLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits_NV: torch.Tensor,
        rows_N: torch.Tensor,
        group: TensorParallelGroup,
    ) -> torch.Tensor:
        num, width = logits_NV.shape
        top = logits_NV.amax(1) if width else logits_NV.new_full((num,), -torch.inf)
        top = group.comm.all_reduce(top, group.ranks, dist.ReduceOp.MAX)
        exp_NV = (logits_NV - top[:, None]).exp()
        mine = rows_N >= 0
        picked = logits_NV.new_zeros(num)
        if width:
            chosen = logits_NV.gather(1, rows_N.clamp(min=0)[:, None])[:, 0] - top
            picked = torch.where(mine, chosen, picked)
        sums = group.sum(torch.stack([exp_NV.sum(1), picked]))
        probs_NV = exp_NV / sums[0][:, None]
        if width:
            probs_NV[mine, rows_N[mine]] -= 1.0
        ctx.save_for_backward(probs_NV)
        return (sums[0].log() - sums[1]).sum(dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (grad_NV,) = ctx.saved_tensors
        return grad_NV * grads[0].to(grad_NV.dtype), None, None


def vocab_parallel_loss_sum(
    logits_NV: torch.Tensor, rows_N: torch.Tensor, group: TensorParallelGroup
) -> torch.Tensor:
    """Sum (not mean) of cross-entropies over N tokens whose logits are cut over the vocabulary.

    Args:
        logits_NV: this rank's columns, [N, V of this rank].
        rows_N: each target's column on this rank, -1 when another rank holds it.

    Returns:
        float64 scalar, the same on every rank of the replica.
    """
    loss = _VocabLoss.apply(logits_NV, rows_N, group)  # type: ignore[no-untyped-call]
    return cast(torch.Tensor, loss)
