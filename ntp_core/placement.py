"""Placement: which units each rank takes, once it is known how many.

Shares say how many units a rank has; any units will do. This module chooses them so that replicas
of unlike shares sum their gradients in few groups, and rank i meets rank i where it can (on many
clusters the i-th ranks of all domains share a switch).

Core and extra ranks, after arXiv 2504.06095, section 4, for any shares: the ranks of the replica
with the fewest ranks cut the units into parts. In every other replica rank i is the core of part i
and keeps a prefix of it, as long as its share allows; the tails that are left go to the ranks that
still lack units. Contiguous layouts, and the same with ranks taken in order of their shares, are
tried too, and the best is chosen.

What is sure, with d ranks in R replicas altogether:
- each rank has its share, each unit one owner in each replica;
- the groups are no more than those of contiguous layouts, which are among the candidates;
- the segments are at most d - (R - 1): beside the reference each replica cuts at most once for each
  core that keeps less than its part and once less than it has takers of tails, together its ranks
  less one;
- for two replicas of even shares that is d - gcd of the degrees, and nothing is less: groups join
  ranks of both replicas into at most gcd islands, an island of k ranks needs k - 1 groups.

What a rank sends does not depend on placement: each element it holds, once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ntp_core.errors import PlanError
from ntp_core.plan import Layout, Plan, Run
from ntp_core.units import UnitKind

Shares = Sequence[Sequence[int]]  # replica -> tp_rank -> units
Placed = tuple[Layout, ...]  # by replica


@dataclass(frozen=True, slots=True)
class SyncShape:
    """What a placement means for gradient sync; the smaller, the better.

    Attributes:
        groups: distinct sets of ranks that sum together.
        segments: runs of units with the same owners, over all kinds.
        off_lane: units, summed over replicas, whose owner is another tp_rank than that of the
            replica with the fewest ranks.
        busiest: groups of the rank that is in most of them: its sums per bucket.
    """

    groups: int
    segments: int
    off_lane: int
    busiest: int


def place(shares: Shares, *, by_lane: bool = True) -> Placed:
    """Layouts of one unit kind, by replica.

    Args:
        by_lane: of equally few groups, prefer that rank i meets rank i; otherwise that no rank is
            in many groups, which a network without lanes likes better.

    Raises:
        PlanError: when replicas do not have the same number of units.

    >>> [layout.runs for layout in place([(2, 2, 2), (3, 3)])]
    [(((0, 2),), ((3, 5),), ((2, 3), (5, 6))), (((0, 3),), ((3, 6),))]
    """
    kind = UnitKind.MLP
    placed = place_kinds([{kind: s} for s in shares], by_lane=by_lane)
    return tuple(layouts[kind] for layouts in placed)


def place_kinds(
    shares: Sequence[Mapping[UnitKind, Sequence[int]]], *, by_lane: bool = True
) -> list[dict[UnitKind, Layout]]:
    """Layouts of all unit kinds, by replica, chosen together: kinds share their groups."""
    if not shares:
        return []
    of_kind = {kind: [replica[kind] for replica in shares] for kind in shares[0]}
    for kind, s in of_kind.items():
        _check(kind, s)
    candidates = [
        {kind: way(s) for kind, s in of_kind.items()}
        for way in (core_extra, contiguous, _by_share(core_extra), _by_share(contiguous))
    ]
    best = min(candidates, key=lambda c: _rank_of(sync_shape(c.values()), by_lane))
    return [{kind: best[kind][r] for kind in best} for r in range(len(shares))]


def place_plan(plan: Plan, *, by_lane: bool = True) -> Plan:
    """The same ranks, shares and batches, units placed anew; layers' own layouts are dropped."""
    shares = [{k: v.shares for k, v in r.layouts.items()} for r in plan.replicas]
    placed = place_kinds(shares, by_lane=by_lane)
    replicas = [
        replace(r, layouts=layouts, overrides={})
        for r, layouts in zip(plan.replicas, placed, strict=True)
    ]
    return Plan.build(plan.counts, replicas, epoch=plan.epoch)


def sync_shape(placed: Iterable[Placed]) -> SyncShape:
    """Figures of the layouts of one or more kinds."""
    groups: set[tuple[int, ...]] = set()
    num_segments = off_lane = 0
    for layouts in placed:
        lane = _reference([layout.shares for layout in layouts])
        for owners, size in _segments(layouts):
            groups.add(owners)
            num_segments += 1
            off_lane += size * sum(owner != owners[lane] for owner in owners)
    sums: dict[tuple[int, int], int] = {}
    for owners in groups:
        for member in enumerate(owners):
            sums[member] = sums.get(member, 0) + 1
    return SyncShape(len(groups), num_segments, off_lane, max(sums.values(), default=0))


def contiguous(shares: Shares) -> Placed:
    """Consecutive units, rank after rank."""
    return tuple(Layout.contiguous(s) for s in shares)


def core_extra(shares: Shares) -> Placed:
    """Cores keep prefixes of the parts that the smallest replica cuts; tails go to the others."""
    reference = _reference(shares)
    parts = shares[reference]
    return tuple(
        Layout.contiguous(s) if r == reference else _keep_prefixes(s, parts)
        for r, s in enumerate(shares)
    )


def _keep_prefixes(shares: Sequence[int], parts: Sequence[int]) -> Layout:
    held: list[list[Run]] = [[] for _ in shares]
    needs = list(shares)
    tails: list[Run] = []
    start = 0
    for i, part in enumerate(parts):
        kept = min(shares[i], part)
        held[i].append((start, start + kept))
        needs[i] -= kept
        tails.append((start + kept, start + part))
        start += part
    _deal([t for t in tails if t[0] < t[1]], needs, held)
    return Layout.of_units([[u for a, b in runs for u in range(a, b)] for runs in held])


def _deal(tails: list[Run], needs: list[int], held: list[list[Run]]) -> None:
    """Give away all tails; one that is just what a rank lacks goes there, uncut."""
    while tails:
        fits = [(t, i) for t in tails for i, need in enumerate(needs) if need == t[1] - t[0]]
        tail, rank = fits[0] if fits else (tails[0], next(i for i, n in enumerate(needs) if n))
        a, b = tail
        middle = min(b, a + needs[rank])
        held[rank].append((a, middle))
        needs[rank] -= middle - a
        place = tails.index(tail)
        tails[place : place + 1] = [(middle, b)] if middle < b else []


def _by_share(way: Callable[[Shares], Placed]) -> Callable[[Shares], Placed]:
    """The way with each replica's ranks in order of their shares: equal shares meet uncut."""

    def sorted_way(shares: Shares) -> Placed:
        orders = [sorted(range(len(s)), key=s.__getitem__, reverse=True) for s in shares]
        placed = way([[s[i] for i in order] for s, order in zip(shares, orders, strict=True)])
        return tuple(
            Layout(tuple(layout.runs[order.index(i)] for i in range(len(order))))
            for layout, order in zip(placed, orders, strict=True)
        )

    return sorted_way


def _rank_of(shape: SyncShape, by_lane: bool) -> tuple[int, ...]:
    last = (shape.off_lane, shape.busiest) if by_lane else (shape.busiest, shape.off_lane)
    return (shape.groups, shape.segments, *last)


def _reference(shares: Shares) -> int:
    """The replica that cuts the parts: the one of the fewest ranks."""
    return min(range(len(shares)), key=lambda r: len(shares[r]))


def _segments(layouts: Placed) -> list[tuple[tuple[int, ...], int]]:
    """(owner's tp_rank in each replica, number of units) of each segment, ascending."""
    owned = [
        sorted((a, b, tp_rank) for tp_rank, runs in enumerate(layout.runs) for a, b in runs)
        for layout in layouts
    ]
    cuts = sorted({b for runs in owned for _, b, _ in runs})
    found: list[tuple[tuple[int, ...], int]] = []
    at = [0] * len(owned)
    start = 0
    for stop in cuts:
        owners = tuple(runs[i][2] for runs, i in zip(owned, at, strict=True))
        if found and found[-1][0] == owners:
            found[-1] = (owners, found[-1][1] + stop - start)
        else:
            found.append((owners, stop - start))
        at = [i + (runs[i][1] == stop) for runs, i in zip(owned, at, strict=True)]
        start = stop
    return found


def _check(kind: UnitKind, shares: Shares) -> None:
    totals = [sum(s) for s in shares]
    if len(set(totals)) != 1 or any(n < 0 for s in shares for n in s):
        raise PlanError(
            f"{kind} shares of the replicas add up to {totals}; each replica must hold all units, "
            "and no rank less than none"
        )
