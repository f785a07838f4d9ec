"""Shares for thousands of replicas at once, on arrays.

The same exact min-max as `ntp_core.planner`, for all replicas together: the time by which
fractional units would end gives shares that are nowhere above the final ones; the few units still
missing (fewer than ranks) are dealt to who finishes them soonest, in all replicas at the same time.
Results equal those of `min_max_shares` unit for unit, ties included.

Costs are plain lines: one speed per rank. Replicas in which memory binds are planned one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ntp_core.cost import Work
from ntp_core.errors import InvalidInput, PlanError
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import RankCost
from ntp_core.planning.batch import batch_shares
from ntp_core.planning.memory import MemoryNeed, RankMemory, shares_in_memory
from ntp_core.units import UnitKind

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_EARLIER = 1 - 1e-12
"""Far enough before the fractional end that rounding cannot place a unit too many."""

_MEMORY_SEARCH_NODES = 0
"""Replicas in which memory binds are placed without the exact search: there may be many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Shares of every rank of every replica; row r is replica r, column i its tp_rank i.

    Attributes:
        shares: kind -> units [replicas, ranks]; 0 for dead ranks.
        batches: sequences of each replica; 0 for those left out.
        sequence_s: seconds per sequence of each replica; infinite for those left out.
        is_member: ranks that take part.
        step_s: predicted step time.
        ideal_s: the same if units and batch could be cut into any fraction.
    """

    shares: Mapping[UnitKind, Ints]
    batches: Ints
    sequence_s: Floats
    is_member: Bools
    step_s: float
    ideal_s: float

    @property
    def efficiency(self) -> float:
        """Ideal over predicted time, in (0, 1]."""
        return self.ideal_s / self.step_s

    @property
    def left_out(self) -> tuple[int, ...]:
        """Replicas without a living rank, or whose ranks cannot hold the model."""
        return tuple(int(r) for r in np.flatnonzero(self.batches == 0))

    def plan(self, epoch: int = 1) -> Plan:
        """The checked plan, with contiguous layouts; global rank = replica * ranks + tp_rank."""
        counts = {k: int(n[self.batches > 0][0].sum()) for k, n in self.shares.items()}
        replicas = [self._replica(int(r)) for r in np.flatnonzero(self.batches)]
        return Plan.build(counts, replicas, epoch=epoch)

    def _replica(self, index: int) -> ReplicaPlan:
        members = np.flatnonzero(self.is_member[index])
        first = index * self.is_member.shape[1]
        return ReplicaPlan(
            ranks=tuple((first + members).tolist()),
            layouts={
                k: Layout.contiguous(n[index, members].tolist()) for k, n in self.shares.items()
            },
            batch=int(self.batches[index]),
        )


def plan_fleet(
    counts: Mapping[UnitKind, int],
    work: Work,
    speeds: Floats,
    global_batch: int,
    need: MemoryNeed | None = None,
    memory_bytes: Floats | float = math.inf,
    collective_s: Callable[[int], float] = lambda members: 0.0,
) -> FleetPlan:
    """Shares and batches of a whole fleet.

    Args:
        counts: units of each kind.
        work: of a sequence.
        speeds: work per second [replicas, ranks]; 0 for a dead rank or an empty slot.
        global_batch: sequences per step over all replicas.
        need: bytes per unit and rank; None where memory never binds.
        memory_bytes: of each rank [replicas, ranks], or of all.
        collective_s: seconds of all collectives per sequence in a replica, by number of members.

    Raises:
        PlanError: when no replica can hold the model, or there are fewer sequences than replicas.
    """
    if speeds.ndim != 2 or not np.isfinite(speeds).all() or (speeds < 0).any():
        raise InvalidInput(
            f"speeds of shape {speeds.shape}; give finite speeds >= 0 [replica, rank]"
        )
    shares: dict[UnitKind, Ints] = {}
    members = (speeds > 0).sum(1)
    collective = np.array([collective_s(n) if n else 0.0 for n in range(speeds.shape[1] + 1)])
    ideal_s = collective[members]
    for kind, count in counts.items():
        unit_s, start_s = _lines(kind, counts, work, speeds)
        shares[kind], kind_ideal_s = _rows_min_max(count, unit_s, start_s)
        ideal_s = ideal_s + kind_ideal_s
    is_able = members > 0
    if need is not None:
        is_able &= _fit_memory(counts, work, speeds, need, memory_bytes, shares)
    if not is_able.any():
        raise PlanError(f"none of {len(speeds)} replicas can hold the model; add ranks or memory")
    sequence_s = collective[members] + _sequence_s(counts, work, speeds, shares)
    sequence_s[~is_able] = np.inf
    batches = np.zeros(len(speeds), np.int64)
    times = [RankCost(unit_s=t) for t in sequence_s[is_able].tolist()]
    batches[is_able] = batch_shares(global_batch, times)
    return FleetPlan(
        shares=shares,
        batches=batches,
        sequence_s=sequence_s,
        is_member=(speeds > 0) & is_able[:, None],
        step_s=float((batches[is_able] * sequence_s[is_able]).max()),
        ideal_s=float(global_batch / (1 / ideal_s[members > 0]).sum()),
    )


def _lines(
    kind: UnitKind, counts: Mapping[UnitKind, int], work: Work, speeds: Floats
) -> tuple[Floats, Floats]:
    """Seconds per unit and before the first, infinite for dead ranks.

    What every rank does whatever its share goes with the kinds in proportion to their size, as in
    `ntp_core.planning.phases.kind_costs`.
    """
    total = sum(work.unit[k] * n for k, n in counts.items())
    part = work.rank * (work.unit[kind] * counts[kind] / total if total else 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        unit_s, start_s = work.unit[kind] / speeds, part / speeds
    is_dead = speeds == 0
    return np.where(is_dead, np.inf, unit_s), np.where(is_dead, np.inf, start_s)


def _rows_min_max(count: int, unit_s: Floats, start_s: Floats) -> tuple[Ints, Floats]:
    """Min-max shares of each row, and its ideal time; rows without a living rank get zeros."""
    ideal_s = _rows_ideal_s(count, unit_s, start_s)
    with np.errstate(invalid="ignore", divide="ignore"):
        done = np.floor((ideal_s[:, None] * _EARLIER - start_s) / unit_s)
    shares = np.where(np.isfinite(done), np.clip(done, 0, count), 0).astype(np.int64)
    shares[~np.isfinite(ideal_s)] = 0
    with np.errstate(invalid="ignore"):
        following_s = start_s + (shares + 1) * unit_s
    missing = np.where(np.isfinite(ideal_s), count - shares.sum(1), 0)
    rows = np.flatnonzero(missing)
    while len(rows):
        rank = following_s[rows].argmin(1)
        shares[rows, rank] += 1
        following_s[rows, rank] = (
            start_s[rows, rank] + (shares[rows, rank] + 1) * unit_s[rows, rank]
        )
        missing[rows] -= 1
        rows = rows[missing[rows] > 0]
    return shares, ideal_s


def _rows_ideal_s(count: int, unit_s: Floats, start_s: Floats) -> Floats:
    """Ideal time of each row: ranks join in the order of their starts, before the end.

    With ranks sorted by start, the end of the first m is (count + sum a/u) / sum 1/u; it falls as
    long as the next rank starts before it, so the smallest of these ends is the one.
    """
    order = start_s.argsort(1, kind="stable")
    with np.errstate(divide="ignore", invalid="ignore"):
        rate = np.take_along_axis(1 / unit_s, order, 1)
        begun = np.take_along_axis(np.nan_to_num(start_s / unit_s), order, 1)  # dead: inf / inf
        ends = (count + np.cumsum(begun, 1)) / np.cumsum(rate, 1)
    ends[~np.isfinite(ends)] = np.inf
    best: Floats = ends.min(1)
    return best


def _sequence_s(
    counts: Mapping[UnitKind, int], work: Work, speeds: Floats, shares: Mapping[UnitKind, Ints]
) -> Floats:
    total = np.zeros(len(speeds))
    is_alive = speeds > 0
    for kind in counts:
        unit_s, start_s = _lines(kind, counts, work, speeds)
        times = np.where(is_alive, start_s, 0) + shares[kind] * np.where(is_alive, unit_s, 0)
        total += times.max(1)
    return total


def _fit_memory(
    counts: Mapping[UnitKind, int],
    work: Work,
    speeds: Floats,
    need: MemoryNeed,
    memory_bytes: Floats | float,
    shares: dict[UnitKind, Ints],
) -> Bools:
    """Plan again, in place, the rows whose shares do not fit; False for rows that never do."""
    room = np.broadcast_to(np.asarray(memory_bytes, dtype=float), speeds.shape)
    used = need.rank + sum(need.unit.get(k, 0.0) * n for k, n in shares.items())
    is_able = np.ones(len(speeds), np.bool_)
    for row in np.flatnonzero(((used > room) & (speeds > 0)).any(1)):
        alive = np.flatnonzero(speeds[row] > 0)
        costs = {}
        for kind in counts:
            unit_s, start_s = _lines(kind, counts, work, speeds[row : row + 1])
            costs[kind] = [
                RankCost(unit_s=float(unit_s[0, i]), start_s=float(start_s[0, i])) for i in alive
            ]
        ranks = [
            RankMemory(rank=int(row * speeds.shape[1] + i), size_bytes=float(room[row, i]))
            for i in alive
        ]
        try:
            found = shares_in_memory(counts, costs, need, ranks, search_nodes=_MEMORY_SEARCH_NODES)
        except PlanError:
            is_able[row] = False
            continue
        for kind, own in found.shares.items():
            shares[kind][row, alive] = own
    return is_able
