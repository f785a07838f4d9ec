"""Is the job faster without this rank? Shares for the best number of members.

Each member costs: every collective has one more hop, and it waits for the slowest. A rank at a
tenth of the speed may bring less than it costs. All member counts are compared, each with its best
set of members.

For a given count m and a time T, the best m members are those that finish most units by T; so the
least T at which the m largest counts hold all units is found by bisection, and no other set of m
members, nor any shares of it, is faster. This holds for any non-decreasing times and caps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ntp_core.errors import PlanError
from ntp_core.planner import CompletionTime, max_time_s, min_max_shares, most_units

_BISECTIONS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RingCollectives:
    """Time of the collectives of a replica per sequence, by number of members.

    Ring all-reduce of n members: 2 (n - 1) hops, and 2 (n - 1) / n of the bytes over each link
    (Patarasuk and Yuan, JPDC 69(2), 2009).

    Attributes:
        calls: all-reduces per sequence.
        hop_s: seconds per hop.
        size_bytes: bytes per call.
        bytes_per_s: of the slowest link of the ring.
    """

    calls: int
    hop_s: float
    size_bytes: float = 0.0
    bytes_per_s: float = math.inf

    def __call__(self, members: int) -> float:
        """Seconds per sequence with that many members."""
        hops = 2 * (members - 1)
        wire_s = hops / members * self.size_bytes / self.bytes_per_s
        return self.calls * (hops * self.hop_s + wire_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What a number of members would bring.

    Attributes:
        members: indexes of the ranks that stay, ascending.
        work_s: time of the slowest of them.
        collective_s: time of their collectives.
    """

    members: tuple[int, ...]
    work_s: float
    collective_s: float

    @property
    def time_s(self) -> float:
        """Both, in seconds."""
        return self.work_s + self.collective_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """The best members and the evidence.

    Attributes:
        shares: units of each rank, 0 for those left out.
        best: what the chosen members bring.
        trials: what each tried number of members brings, from all down.
    """

    shares: tuple[int, ...]
    best: Trial
    trials: tuple[Trial, ...]

    @property
    def left_out(self) -> tuple[int, ...]:
        """Indexes of the ranks that the job is faster without."""
        return tuple(i for i in range(len(self.shares)) if i not in self.best.members)


def without_slow_ranks(
    num_units: int,
    costs: Sequence[CompletionTime],
    collective_s: Callable[[int], float],
    present: Sequence[int] | None = None,
) -> Membership:
    """The best members among all numbers of them, and their shares.

    With fewer members the work takes no less time. So it stops as soon as the work alone takes as
    long as the best found. Ties keep more members.

    Args:
        num_units: units to place, >= 1.
        costs: one per rank.
        collective_s: seconds of all collectives by number of members, >= 0.
        present: shares now; among optima of the chosen members the nearest is taken.

    Raises:
        PlanError: when the caps of all ranks together leave units without place.
    """
    trials: list[Trial] = []
    for count in range(len(costs), 0, -1):
        try:
            members = _best_members(num_units, costs, count)
        except PlanError:
            if not trials:
                raise
            break  # fewer hold even less
        chosen = [costs[i] for i in members]
        work_s = max_time_s(min_max_shares(num_units, chosen), chosen)
        trials.append(Trial(members=members, work_s=work_s, collective_s=collective_s(count)))
        if work_s >= min(t.time_s for t in trials):
            break
    best = min(trials, key=lambda t: t.time_s)
    return Membership(
        shares=_spread(num_units, costs, best.members, present), best=best, trials=tuple(trials)
    )


def _best_members(num_units: int, costs: Sequence[CompletionTime], count: int) -> tuple[int, ...]:
    """The `count` ranks with which the units are finished soonest."""
    low, high = 0.0, max(c.time_s(most_units(math.inf, c, num_units)) for c in costs)
    best = _largest(high, num_units, costs, count)
    if best is None:
        raise PlanError(f"no {count} of {len(costs)} ranks hold {num_units} units; use more ranks")
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        found = _largest(middle, num_units, costs, count)
        low, high, best = (middle, high, best) if found is None else (low, middle, found)
    return best


def _largest(
    limit_s: float, num_units: int, costs: Sequence[CompletionTime], count: int
) -> tuple[int, ...] | None:
    """Those who finish most by `limit_s`, if they finish all; ties to the faster for all units."""
    done = [most_units(limit_s, c, num_units) for c in costs]
    order = sorted(range(len(costs)), key=lambda i: (-done[i], costs[i].time_s(1), i))[:count]
    return tuple(sorted(order)) if sum(done[i] for i in order) >= num_units else None


def _spread(
    num_units: int,
    costs: Sequence[CompletionTime],
    members: Sequence[int],
    present: Sequence[int] | None,
) -> tuple[int, ...]:
    have = None if present is None else [present[i] for i in members]
    shares = min_max_shares(num_units, [costs[i] for i in members], have)
    placed = dict(zip(members, shares, strict=True))
    return tuple(placed.get(i, 0) for i in range(len(costs)))
