"""Planes: all that a job keeps per parameter element, moved, verified and saved alike.

The first plane is the parameters; the others are the optimizer's state, of which a rank may keep
other blocks than of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from ntp_core.fingerprint import signed
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.content import (
    BlockIndex,
    block_fingerprints,
    counted_mask,
)
from ntp_core.runtime.optim.adamw import PlaneAdamW
from ntp_core.runtime.shards import Placement, Shards

PARAM = "param"
ADAM_STATE = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Plane:
    """One value per element of some blocks.

    Attributes:
        placement: the blocks of each tensor that are here.
        tensors: their values, one local tensor for each of the model's tensors.
    """

    name: str
    placement: Placement
    tensors: list[torch.Tensor]


def state_of(shards: Shards, optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], Placement]:
    """Names of the optimizer's planes, and which blocks of them are here."""
    if isinstance(optimizer, PlaneAdamW):
        return optimizer.state_names, optimizer.placement
    return ADAM_STATE, shards


def state_dtype(param: torch.Tensor, optimizer: torch.optim.Optimizer) -> torch.dtype:
    """Element type of the optimizer's state of a parameter."""
    return torch.float32 if isinstance(optimizer, PlaneAdamW) else param.dtype


def planes_of(shards: Shards, optimizer: torch.optim.Optimizer) -> list[Plane]:
    """Parameters and optimizer state, made (zero) where Adam has none yet."""
    names, placement = state_of(shards, optimizer)
    found = [Plane(PARAM, shards, [p.data for p in shards.params])]
    for name in names:
        tensors = []
        for param in shards.params:
            state = optimizer.state[param]
            if name not in state:
                state.setdefault("step", torch.tensor(0.0))
                state[name] = torch.zeros_like(param)
            tensors.append(state[name])
        found.append(Plane(name, placement, tensors))
    return found


def adopt_state(
    shards: Shards, optimizer: torch.optim.Optimizer, planes: Sequence[Plane], steps: int
) -> None:
    """Take other tensors as the optimizer's state.

    Args:
        planes: of the optimizer, the parameters' one left out.
        steps: updates that this state has seen. A share that was empty had no gradient and so no
            steps; its new units had them all.
    """
    for i, param in enumerate(shards.params):
        state = optimizer.state[param]
        state["step"] = torch.tensor(float(steps))
        for plane in planes:
            state[plane.name] = plane.tensors[i]


def optimizer_steps(comm: Comm, optimizer: torch.optim.Optimizer) -> int:
    """Updates that the optimizer has made: the most of any parameter on any rank."""
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    word = torch.tensor([max(counts, default=0)], dtype=torch.int64)
    return int(comm.all_reduce(word, comm.world, dist.ReduceOp.MAX))


def own_fingerprints(
    planes: Sequence[Plane],
    index: BlockIndex,
    *,
    seed: int,
    check: int = 0,
    like: Sequence[Plane] = (),
    known: Sequence[npt.NDArray[np.int64]] = (),
) -> list[npt.NDArray[np.int64]]:
    """For each plane the fingerprints of what is here, [blocks of the model]; 0 elsewhere.

    Args:
        like, known: planes and their fingerprints under the same keys; tensors that are the very
            same ones are not read again.
    """
    found = []
    for p, plane in enumerate(planes):
        old = like[p].tensors if like else [None] * len(plane.tensors)
        out = np.zeros(index.total, dtype=np.int64)
        for shard, tensor, same in zip(plane.placement.shards, plane.tensors, old, strict=True):
            places = [index.start[shard.index] + b for b in shard.blocks]
            if tensor is same:
                out[places] = known[p][places]
                continue
            values = block_fingerprints(shard, tensor, seed=seed + p, check=check)
            out[places] = [signed(values[b]) for b in shard.blocks]
        found.append(out)
    return found


def shared_fingerprints(
    comm: Comm, planes: Sequence[Plane], index: BlockIndex, *, seed: int, check: int = 0
) -> list[npt.NDArray[np.int64]]:
    """For each plane the fingerprints of all its copies in the job, [copies, blocks of the model].

    Plane p is keyed with `seed` + p.
    """
    own = own_fingerprints(planes, index, seed=seed, check=check)
    return share_fingerprints(comm, planes, own, index)


def share_fingerprints(
    comm: Comm,
    planes: Sequence[Plane],
    own: Sequence[npt.NDArray[np.int64]],
    index: BlockIndex,
) -> list[npt.NDArray[np.int64]]:
    """All ranks' fingerprints, gathered by one sum in which each number has one source."""
    sizes = [p.placement.copies for p in planes]
    table = np.zeros((sum(sizes), index.total), dtype=np.int64)
    first = 0
    for plane, size, mine in zip(planes, sizes, own, strict=True):
        table[first + plane.placement.copy] = mine * counted_mask(plane.placement, index)
        first += size
    comm.all_reduce(torch.from_numpy(table), comm.world)
    return np.split(table, np.cumsum(sizes)[:-1])


def copies_agree(
    planes: Sequence[Plane],
    tables: Sequence[npt.NDArray[np.int64]],
    index: BlockIndex,
    *,
    seed: int,
    check: int = 0,
) -> bool:
    """Whether all that this rank holds without speaking for it is what its speaker holds.

    Tensors that every rank holds whole, and blocks that several ranks of a replica hold, enter the
    shared fingerprints once.

    Args:
        tables: the shared fingerprints of these planes, of the same `seed` and `check`.
    """
    for p, (plane, table) in enumerate(zip(planes, tables, strict=True)):
        row, counted = table[plane.placement.copy], plane.placement.counted()
        for shard, tensor, spoken in zip(
            plane.placement.shards, plane.tensors, counted, strict=True
        ):
            silent = set(shard.blocks) - set(spoken)
            if not silent:
                continue
            values = block_fingerprints(shard, tensor, seed=seed + p, check=check)
            start = index.start[shard.index]
            if any(signed(values[b]) != int(row[start + b]) for b in silent):
                return False
    return True


def plane_bytes(plane: Plane) -> int:
    """Bytes of one element."""
    return plane.tensors[0].element_size() if plane.tensors else 0
