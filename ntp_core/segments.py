"""Segments: how uneven replicas sum their gradients without resharding.

Cut the units at the union of all replicas' boundaries. Every segment then has exactly one owner in
each replica; those owners form a group, and one all-reduce in that group sums the segment. No bytes
are staged on other ranks, and replicas may have any mix of degrees.

Blocks that several units share (a KV head copied to each rank that holds some of its query heads)
are summed by `copies`: their first owner is the one that counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from ntp_core.plan import Plan
from ntp_core.units import ModelUnits, TensorSpec


@dataclass(frozen=True, slots=True)
class Segment:
    """Units [start, stop) of one kind and layer, and their owner's global rank in each replica."""

    start: int
    stop: int
    owners: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """Blocks of one tensor that one group sums; `tensor` indexes the model's tensors."""

    tensor: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SyncGroup:
    """Ranks, one per replica, and all pieces they sum together, in one fixed order."""

    ranks: tuple[int, ...]
    pieces: tuple[Piece, ...]


def unit_owners(plan: Plan, tensor: TensorSpec) -> list[list[int]]:
    """For each replica the global rank that owns each unit of this tensor's kind and layer."""
    assert tensor.kind is not None
    owners = []
    for r in plan.replicas:
        places = r.layout(tensor.kind, tensor.layer).owners(plan.counts[tensor.kind])
        owners.append([r.ranks[p] for p in places])
    return owners


def segments(plan: Plan, tensor: TensorSpec) -> tuple[Segment, ...]:
    """The segments of this tensor's kind and layer, ascending.

    >>> from ntp_core.plan import Layout, ReplicaPlan
    >>> from ntp_core.units import UnitKind
    >>> K = UnitKind.MLP
    >>> def rep(ranks, shares):
    ...     return ReplicaPlan(ranks=ranks, layouts={K: Layout.contiguous(shares)}, batch=1)
    >>> plan = Plan.build({K: 6}, [rep((0, 1, 2), (2, 2, 2)), rep((3, 4), (3, 3))])
    >>> [(s.start, s.stop, s.owners) for s in segments(plan, TensorSpec(
    ...     name="w", shape=(6, 1), kind=K))]
    [(0, 2, (0, 3)), (2, 3, (1, 3)), (3, 4, (1, 4)), (4, 6, (2, 4))]
    """
    columns = list(zip(*unit_owners(plan, tensor), strict=True))
    found: list[Segment] = []
    for u, owners in enumerate(columns):
        if found and found[-1].owners == owners:
            found[-1] = Segment(found[-1].start, u + 1, owners)
        else:
            found.append(Segment(u, u + 1, owners))
    return tuple(found)


def sync_groups(plan: Plan, model: ModelUnits) -> tuple[SyncGroup, ...]:
    """All groups with what each sums, sorted by their ranks: one global launch order.

    Tensors without units are not here: every rank holds them whole.
    """
    pieces: dict[tuple[int, ...], list[Piece]] = {}
    for index, t in enumerate(model.tensors):
        if t.kind is None:
            continue
        by_group: dict[tuple[int, ...], list[int]] = {}
        for s in segments(plan, t):
            for block in range(s.start // t.sharing, -(-s.stop // t.sharing)):
                if s.start <= block * t.sharing < s.stop:  # the owner of a block's first unit
                    by_group.setdefault(s.owners, []).append(block)
        for owners, blocks in by_group.items():
            pieces.setdefault(owners, []).append(Piece(index, tuple(blocks)))
    return tuple(SyncGroup(ranks, tuple(pieces[ranks])) for ranks in sorted(pieces))
