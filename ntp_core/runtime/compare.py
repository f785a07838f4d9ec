"""Do all replicas hold the same bits? Compared inside the job, 8 bytes per block.

Two kinds of evidence. Between the end of one step and the optimizer step of the next nobody may
write parameters, so a rank whose bits changed in between names itself ("at rest"). Otherwise, with
three holders of a block or more, the minority is named. Two replicas that merely differ name
nobody. A block's holders are its owners, one per replica; where several ranks of a replica hold a
copy (a KV head of several query heads), all of them; a tensor that every rank holds whole has every
rank for a holder.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ntp_core.fingerprint import signed
from ntp_core.observe import Blame
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.content import BlockIndex, fingerprint_vector, owned_by
from ntp_core.runtime.shards import Placement, Shards
from ntp_core.segments import block_holders

Vector = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Difference:
    """One holder of one block is wrong, or (blame UNDECIDED) the holders differ.

    Attributes:
        rank: the wrong holder; None when not known.
        source: a rank that holds the right bits; None when not known.
    """

    block_index: int
    blame: Blame
    rank: int | None
    source: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What one comparison found; the same on every rank."""

    values: tuple[int, ...]  # fingerprint of each whole replica, signed 64-bit
    differences: tuple[Difference, ...]


class ReplicaCheck:
    """Compares parameters over replicas; remembers this rank's own bits at the end of a step.

    Under a new plan build a new one.

    Attributes:
        has_peers: some cut block is held more than once, so that there is something to compare.
    """

    def __init__(self, comm: Comm, shards: Shards, seed: int) -> None:
        self._comm = comm
        self._shards = shards
        self._seed = seed
        self.index = BlockIndex(shards.model)
        self._speakers = [
            owned_by(shards.plan, shards.model, self.index, r)
            for r in range(len(shards.plan.replicas))
        ]
        self._holders = holders(shards)
        self.has_peers = len(shards.plan.replicas) > 1 or _has_copies(shards)
        self._at_end: Vector | None = None
        self._check = 0

    def remember(self) -> None:
        """Note this rank's bits now, right after the optimizer step."""
        self._check += 1
        self._at_end = self._vector()

    def forget(self) -> None:
        """Parameters were written on purpose; the note no longer holds."""
        self._at_end = None

    def compare(self) -> Comparison:
        """Compare now. Every rank of the world takes part, with the key of its last note."""
        mine = self._vector()
        rows = self._comm.world[-1] + 1  # by global rank; ranks that are gone leave theirs empty
        table = np.zeros((2, rows, self.index.total), dtype=np.int64)
        table[0, self._comm.rank] = mine
        if self._at_end is not None:
            table[1, self._comm.rank] = mine != self._at_end
        self._comm.all_reduce(torch.from_numpy(table), self._comm.world)
        found = judge(table[0], table[1].astype(np.bool_), self._holders)
        return Comparison(replica_values(table[0], self._speakers), found)

    def _vector(self) -> Vector:
        params: list[torch.Tensor] = [p.data for p in self._shards.params]
        vectors = fingerprint_vector(
            self._shards, [params], self.index, seed=self._seed, check=self._check
        )
        row: Vector = vectors[0]
        return row


def holders(shards: Placement) -> list[tuple[int, ...]]:
    """The global ranks that hold each block: all owners of a copy, or every rank."""
    held: list[tuple[int, ...]] = []
    for t in shards.model.tensors:
        held += [shards.plan.ranks] if t.kind is None else block_holders(shards.plan, t)
    return held


def _has_copies(shards: Placement) -> bool:
    shared = [t for t in shards.model.tensors if t.sharing > 1]
    return any(len(ranks) > 1 for t in shared for ranks in block_holders(shards.plan, t))


def judge(
    values: Vector, changed: npt.NDArray[np.bool_], held_by: list[tuple[int, ...]]
) -> tuple[Difference, ...]:
    """Verdict from each rank's fingerprints and at-rest changes, both [ranks, blocks]."""
    found: list[Difference] = []
    for block, ranks in enumerate(held_by):
        mine = values[list(ranks), block]
        moved = changed[list(ranks), block]
        if moved.any() or (mine != mine[0]).any():
            found += _judge_block(block, ranks, mine, moved)
    return tuple(found)


def replica_values(values: Vector, speakers: list[list[int]]) -> tuple[int, ...]:
    """Fingerprint of each whole replica: every block once, by the rank that speaks for it."""
    totals = []
    for owners in speakers:
        picked = values[owners, np.arange(len(owners))]
        totals.append(signed(int(picked.view(np.uint64).sum(dtype=np.uint64))))
    return tuple(totals)


def _judge_block(
    block: int, ranks: tuple[int, ...], mine: Vector, moved: npt.NDArray[np.bool_]
) -> list[Difference]:
    if moved.any():
        still = [g for g, m in zip(ranks, moved, strict=True) if not m]
        agree = len({int(v) for v, m in zip(mine, moved, strict=True) if not m}) == 1
        source = still[0] if agree else None
        return [
            Difference(block, Blame.AT_REST, g, source)
            for g, m in zip(ranks, moved, strict=True)
            if m
        ]
    kinds, counts = np.unique(mine, return_counts=True)
    top = int(counts.argmax())
    if counts[top] * 2 <= len(ranks):
        return [Difference(block, Blame.UNDECIDED, None, None)]
    right = kinds[top]
    source = ranks[int(np.flatnonzero(mine == right)[0])]
    return [
        Difference(block, Blame.MAJORITY, g, source)
        for g, v in zip(ranks, mine, strict=True)
        if v != right
    ]
