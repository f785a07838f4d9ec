"""Forward passes of cut modules: what each style does around a layer that was there before.

A module keeps its class, names and code; only its `forward` is replaced on the instance. Local
shapes may be 0 and change with the plan, so nothing about them is remembered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ntp_core.errors import ModelMismatch
from ntp_core.runtime.layers import TensorParallelGroup, copy_to_group, sum_over_group
from ntp_core.styles import Style

Forward = Callable[..., Any]


class InputCopies:
    """Lets modules that read the same tensor share one backward sum.

    q, k and v read one input; with a copy each, its gradient would be summed three times. The last
    copy is held on to until its gradient is there, or another tensor is read: nobody else need
    hold it (a linear layer of a 3-dim input saves a view of it).
    """

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # what was read, its copy

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The copy of `x` whose gradient is summed over the replica."""
        if not (torch.is_grad_enabled() and x.requires_grad):
            return x
        if self._last is not None and self._last[0] is x:
            return self._last[1]
        copy = copy_to_group(x, self._group)
        copy.register_hook(self._forget)  # type: ignore[no-untyped-call]
        self._last = x, copy
        return copy

    def _forget(self, _grad: torch.Tensor) -> None:
        self._last = None


class GatherByRows(torch.autograd.Function):
    """Puts cut outputs together: each rank writes its columns, the sum is the whole."""

    @staticmethod
    def forward(
        ctx: Any, local: torch.Tensor, columns: torch.Tensor, width: int, group: TensorParallelGroup
    ) -> torch.Tensor:
        """[..., columns of this rank] -> [..., width], the same on every rank of the replica."""
        ctx.save_for_backward(columns)
        whole = local.new_zeros(*local.shape[:-1], width)
        whole[..., columns] = local
        return group.sum(whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        """This rank's columns of the gradient."""
        (columns,) = ctx.saved_tensors
        return grads[0][..., columns], None, None, None


def is_conv1d(module: nn.Module) -> bool:
    """A linear layer that keeps its weight as [in, out], as GPT-2's does."""
    return type(module).__name__ == "Conv1D"


def linear(module: nn.Module, x: torch.Tensor, *, bias: bool) -> torch.Tensor:
    """The module's product with its local weight."""
    weight, own = cast(torch.Tensor, module.weight), getattr(module, "bias", None)
    if is_conv1d(module):
        weight = weight.t()
    return F.linear(x, weight, own if bias else None)


def colwise(module: nn.Module, copies: InputCopies) -> Forward:
    """Outputs cut."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        return linear(module, copies.of(x), bias=True)

    return forward


def rowwise(module: nn.Module, group: TensorParallelGroup) -> Forward:
    """Inputs cut; bias once, after the sum."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        out = sum_over_group(linear(module, x, bias=False), group)
        bias = getattr(module, "bias", None)
        return out if bias is None else out + bias

    return forward


def gathered(
    module: nn.Module,
    copies: InputCopies,
    group: TensorParallelGroup,
    columns: Callable[[], torch.Tensor],
    width: int,
) -> Forward:
    """Outputs cut, then put together in the model's order."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        local = linear(module, copies.of(x), bias=True)
        out = GatherByRows.apply(local, columns(), width, group)  # type: ignore[no-untyped-call]
        return cast(torch.Tensor, out)

    return forward


def embedding(
    module: nn.Module, group: TensorParallelGroup, rows: Callable[[], torch.Tensor]
) -> Forward:
    """Vocab rows cut. `rows` maps a token to this rank's row, -1 where another rank holds it."""

    def forward(tokens: torch.Tensor) -> torch.Tensor:
        weight = cast(torch.Tensor, module.weight)
        local_rows = rows()[tokens]
        if weight.shape[0] == 0:  # no rows here: zeros that still take part in the sum
            local = weight.sum() * weight.new_zeros(*tokens.shape, weight.shape[1])
        else:
            local = F.embedding(local_rows.clamp(min=0), weight)
            local = local * (local_rows >= 0).unsqueeze(-1)
        return sum_over_group(local, group)

    return forward


def experts(module: nn.Module, group: TensorParallelGroup, copies: InputCopies) -> Forward:
    """A module of experts whose columns are cut: forward(hidden, indices, weights).

    Each rank's gradient of the routing weights covers its own columns, so that is summed too.
    """
    whole = module.forward

    def forward(
        hidden: torch.Tensor, indices: torch.Tensor, weights: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        out = whole(copies.of(hidden), indices, copy_to_group(weights, group), *rest)
        return sum_over_group(out, group)

    return forward


def refuse(module: nn.Module, name: str, style: Style) -> ModelMismatch:
    """The error for a style that does not fit a module."""
    return ModelMismatch(
        f"'{name}' is a {type(module).__name__}; style '{style}' cuts linear layers "
        "(nn.Linear, Conv1D), embeddings and expert parameters"
    )
