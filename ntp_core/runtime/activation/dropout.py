"""Dropout that does not know where it runs: a draw for each logical element of each token.

A mask is a pure function of (seed, step, place, sequence, position, feature), all of them numbers
of the whole model and the whole batch. So it is the same at any layout, any split of the batch,
in any micro-batch and in a recomputed layer, and no generator's state has to be saved.

The draw is splitmix64's finaliser over the sum of two keys that are mixed themselves
(`ntp_core.fingerprint`); the keys are made on the host, the elements in torch's int64, whose
products wrap. Legend: B batch, T positions, F features here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from ntp_core.errors import InvalidInput
from ntp_core.fingerprint import U64, index_keys

_M1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_M2 = 0x94D049BB133111EB - (1 << 64)
_DRAW_BITS = 53


@dataclass(slots=True)
class Draws:
    """What all draws of a forward pass have in common; set it before each micro-batch.

    It must stay as it is until backward is through, which may run layers again.

    Attributes:
        step: of the job.
        sequences: number in the step's global batch of each sequence in the micro-batch, int64 [B].
    """

    seed: int
    step: int = 0
    sequences: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def at(self, step: int, first: int, count: int) -> None:
        """Sequences first .. first + count - 1 of a step are next."""
        self.step, self.sequences = step, torch.arange(first, first + count)


class UnitDropout(nn.Module):
    """Sets elements to 0 with probability `rate` and scales the others by 1 / (1 - rate).

    Args:
        draws: shared by all dropouts of the model.
        place: this dropout's number in the model; no two may have the same.
        features: logical index of each element of the last dim on this rank: `logical_index` of the
            shard whose rows made it, or a range where every rank has all.
    """

    def __init__(
        self, rate: float, draws: Draws, place: int, features: Callable[[], torch.Tensor]
    ) -> None:
        super().__init__()
        if not 0.0 <= rate < 1.0:
            raise InvalidInput(f"dropout rate {rate}; give one in [0, 1)")
        self.rate = rate
        self.draws = draws
        self.place = place
        self._features = features

    def forward(self, x_BTF: torch.Tensor) -> torch.Tensor:
        """[B, T, F] -> [B, T, F]; as it is in evaluation."""
        if not self.training or self.rate == 0.0:
            return x_BTF
        features_F = self._features().to(x_BTF.device)
        keep_BTF = keep_mask(self.rate, self.draws, self.place, x_BTF.shape[1], features_F)
        return x_BTF * (keep_BTF.to(x_BTF.dtype) / (1.0 - self.rate))


def keep_mask(
    rate: float, draws: Draws, place: int, seq: int, features_F: torch.Tensor
) -> torch.Tensor:
    """True where an element stays, bool [B, seq, F], on the device of `features_F`."""
    tokens = draws.sequences[:, None] * (1 << 32) + torch.arange(seq)
    rows = _keys(draws, place, 0, tokens.flatten()).to(features_F.device)
    columns = _keys(draws, place, 1, features_F).to(features_F.device)
    words = _mix64(rows[:, None] + columns[None, :])
    drawn = _shift(words, 64 - _DRAW_BITS)
    return (drawn >= int(rate * (1 << _DRAW_BITS))).view(*tokens.shape, len(features_F))


def _keys(draws: Draws, place: int, axis: int, index: torch.Tensor) -> torch.Tensor:
    keys: U64 = index_keys(draws.seed, draws.step, place, axis, index.cpu().numpy())
    return torch.from_numpy(keys.view(np.int64))


def _mix64(words: torch.Tensor) -> torch.Tensor:
    words = (words ^ _shift(words, 30)) * _M1
    words = (words ^ _shift(words, 27)) * _M2
    return words ^ _shift(words, 31)


def _shift(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift to the right; torch's is arithmetic."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)
