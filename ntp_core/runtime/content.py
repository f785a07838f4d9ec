"""Content of a rank's shards: fingerprints per block.

Blocks of all tensors are numbered through the model in one fixed order ("block index"), so that a
vector over block indices means the same on every rank and under every plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ntp_core.fingerprint import U64, index_keys, sum_by_cols, sum_by_rows
from ntp_core.plan import Plan
from ntp_core.runtime.shards import Placement, Shard
from ntp_core.units import ModelUnits

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class BlockIndex:
    """Numbers all blocks of a model: block b of tensor i has index `start[i] + b`."""

    def __init__(self, model: ModelUnits) -> None:
        self.start: list[int] = []
        self.total = 0
        self._owners: list[int] = []
        for i, t in enumerate(model.tensors):
            blocks = 1 if t.kind is None else model.counts[t.kind] // t.sharing
            self.start.append(self.total)
            self.total += blocks
            self._owners += [i] * blocks

    def tensor_of(self, index: int) -> tuple[int, int]:
        """(tensor, block) of a block index."""
        tensor = self._owners[index]
        return tensor, index - self.start[tensor]


def block_fingerprints(
    shard: Shard, tensor: torch.Tensor, *, seed: int, check: int
) -> dict[int, int]:
    """Fingerprint of each held block of a local tensor, block -> unsigned 64-bit value.

    Bits are taken as they are: -0.0 differs from 0.0, NaN payloads count. CPU tensors are read in
    place, others are copied to the host first.
    """
    if tensor.dim() > 2:  # rows along the cut dim, all other dims in one
        tensor = tensor.movedim(shard.spec.dim, 0).flatten(1).contiguous()
    dim = shard.spec.dim if len(shard.spec.shape) == 2 else 0
    bits = _bits(tensor)
    cut = index_keys(seed, check, shard.index, dim, shard.logical_index().numpy())
    other = bits.shape[1 - dim]
    whole = index_keys(seed, check, shard.index, 1 - dim, np.arange(other))
    sums = sum_by_rows(bits, cut, whole) if dim == 0 else sum_by_cols(bits, whole, cut)
    return {
        b: sum(int(sums[a:z].sum(dtype=np.uint64)) for a, z in shard.spans((b,))) & (2**64 - 1)
        for b in shard.blocks
    }


def fingerprint_vector(
    shards: Placement,
    planes: Sequence[Sequence[torch.Tensor]],
    index: BlockIndex,
    *,
    seed: int,
    check: int,
) -> npt.NDArray[np.int64]:
    """Fingerprints of all blocks this rank holds, [planes, blocks of the model]; 0 elsewhere."""
    out: U64 = np.zeros((len(planes), index.total), dtype=np.uint64)
    for p, tensors in enumerate(planes):
        for i, (shard, tensor) in enumerate(zip(shards.shards, tensors, strict=True)):
            values = block_fingerprints(shard, tensor, seed=seed + p, check=check)
            for b, value in values.items():
                out[p, index.start[i] + b] = value
    return out.view(np.int64)


def counted_mask(shards: Placement, index: BlockIndex) -> npt.NDArray[np.bool_]:
    """True at the block indices for which this rank speaks in its replica.

    Masked vectors summed over a replica's ranks are the replica's vector, whatever the layout.
    """
    mask = np.zeros(index.total, dtype=np.bool_)
    for i, blocks in enumerate(shards.counted()):
        mask[[index.start[i] + b for b in blocks]] = True
    return mask


def owned_by(plan: Plan, model: ModelUnits, index: BlockIndex, replica: int) -> list[int]:
    """Global rank that speaks for each block index in one replica."""
    r = plan.replicas[replica]
    owners = []
    for t in model.tensors:
        if t.kind is None:
            owners.append(r.ranks[0])
            continue
        places = r.layout(t.kind, t.layer).owners(model.counts[t.kind])
        owners += [r.ranks[p] for p in places[:: t.sharing]]
    assert len(owners) == index.total
    return owners


def _bits(tensor: torch.Tensor) -> npt.NDArray[Any]:
    flat = tensor.detach().cpu()
    size = flat.element_size()
    array = flat.view(_BITS[size]).numpy().view(_UNSIGNED[size])
    return array.reshape(-1, 1) if array.ndim == 1 else array
