"""Shares: how many units each rank takes so that the slowest finishes soonest.

Exact min-max for identical units and non-decreasing completion times. Call the n-th unit of rank i
an event at time t_i(n). Shares n_i are the first n_i events of each rank, and the slowest rank ends
at the latest event taken: so the U earliest events, dealt one after the other in the order
(time, rank), are an optimum. Largest remainder and similar roundings are not exact. Only monotone
times and caps are used: fixed starts, rooflines and tile steps are covered (arXiv 2504.06095 cuts
evenly; the argument is that of D'Hondt's divisors, which it equals for t = n / speed).

With many units the first ones are placed at once: any shares that are nowhere above the final ones
lead to them, and the shares that finish by a time before the optimum are such shares. That time is
found by bisection, so the cost is N log(time) + N log(N), not U log(N).

Pure arithmetic; no I/O.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ntp_core.errors import PlanError
from ntp_core.plan import Layout

_BISECTIONS = 200
"""Most halvings of a time; a float's 53 bits are used up long before."""

_HEAP_UNITS_PER_RANK = 4
"""Up to so many units per rank, dealing one by one costs less than looking for a head start."""


class CompletionTime(Protocol):
    """When a rank finishes, as a function of its units.

    `time_s` must not decrease with the units (`ntp_core.planning.phases.StepCost` is for times
    that do), and must be finite for 0 to `cap` units.
    """

    @property
    def cap(self) -> int | None:
        """Most units that fit its memory, or None."""

    def time_s(self, units: int) -> float:
        """Completion time with that many units, in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """Time of one rank as a function of its units: `start_s + units * unit_s`, at most `cap` units.

    Attributes:
        unit_s: seconds per unit, >= 0.
        start_s: seconds it needs whatever its share, >= 0.
        cap: most units that fit its memory, or None.
    """

    unit_s: float
    start_s: float = 0.0
    cap: int | None = None

    def time_s(self, units: int) -> float:
        """Completion time with that many units."""
        return self.start_s + units * self.unit_s


@dataclass(frozen=True, slots=True, kw_only=True)
class CappedCost:
    """Any completion time with a smaller cap."""

    cost: CompletionTime
    cap: int

    def time_s(self, units: int) -> float:
        """Completion time with that many units."""
        return self.cost.time_s(units)


def min_max_shares(
    num_units: int,
    costs: Sequence[CompletionTime],
    present: Sequence[int] | None = None,
    least: int = 0,
    floor_s: float = 0.0,
) -> tuple[int, ...]:
    """Shares with the smallest possible largest completion time.

    Among all optima it takes one that moves the fewest units away from `present`.

    Args:
        num_units: units to place, >= 0.
        costs: one per rank.
        present: shares now, in the same order; None places from nothing.
        least: fewest units a rank may have.
        floor_s: a time that passes anyway: `present` shares that end by it are as good as optimal.

    Raises:
        PlanError: when the caps leave units without place.
    """
    _check_room(num_units, costs, least)
    best = _fill([least] * len(costs), num_units, costs)
    if present is None:
        return best
    limit_s = max(floor_s, max_time_s(best, costs))
    kept = [
        max(least, most_units(limit_s, cost, have))
        for have, cost in zip(present, costs, strict=True)
    ]
    while sum(kept) > num_units:  # only when `present` held more units than there are
        kept[kept.index(max(kept))] -= 1
    return _fill(kept, num_units, costs)


def max_time_s(shares: Sequence[int], costs: Sequence[CompletionTime]) -> float:
    """When the last rank finishes. A rank without units does not take part."""
    return max(
        (cost.time_s(n) for n, cost in zip(shares, costs, strict=True) if n > 0), default=0.0
    )


def most_units(limit_s: float, cost: CompletionTime, most: int) -> int:
    """Most units, up to `most` and the cap, that a rank finishes by `limit_s`."""
    most = most if cost.cap is None else min(most, cost.cap)
    if most <= 0 or cost.time_s(most) <= limit_s:
        return max(0, most)
    if isinstance(cost, RankCost) and cost.unit_s > 0:
        return _most_linear(limit_s, cost, most)
    low, high = 0, most  # `high` is too many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost.time_s(middle) <= limit_s else (low, middle)
    return low


def ideal_time_s(num_units: int, costs: Sequence[CompletionTime]) -> float:
    """The bound that fractional units would reach: all ranks that take part finish together.

    A rank that starts later than that takes none. Linear costs are taken without their caps. Other
    times are interpolated between whole units, within their caps. No whole shares can be faster.
    """
    linear = [c for c in costs if isinstance(c, RankCost) and c.unit_s > 0]
    if len(linear) == len(costs):
        return _ideal_linear_s(num_units, linear)
    low, high = 0.0, max_time_s(min_max_shares(num_units, costs), costs)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if not low < middle < high:
            break
        is_enough = sum(_fraction_by(middle, c, num_units) for c in costs) >= num_units
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def over_ideal(shares: Sequence[int], costs: Sequence[CompletionTime]) -> float:
    """Time of these shares over that of an ideal cut into fractions, >= 1: the cost of granules."""
    return max_time_s(shares, costs) / ideal_time_s(sum(shares), costs)


def keep_placement(shares: Sequence[int], present: Layout) -> Layout:
    """A layout with these shares in which every rank keeps as many of its units as it can.

    Units that must move come off the end of the giver's last run, so that runs stay few. The
    number of moved units is the least possible: the sum of what each rank gains. Units that nobody
    holds, those of ranks that are gone, go to who needs units.
    """
    held = [list(present.units(r)) for r in range(len(present.runs))]
    held += [[] for _ in range(len(shares) - len(held))]
    spare = list(set(range(sum(shares))).difference(*held))
    for have, share in zip(held, shares, strict=True):
        spare += [have.pop() for _ in range(len(have) - share)]
    spare.sort()
    for have, share in zip(held, shares, strict=True):
        need = share - len(have)
        have += spare[:need] if need > 0 else []
        spare = spare[need:] if need > 0 else spare
    return Layout.of_units(held)


def _most_linear(limit_s: float, cost: RankCost, most: int) -> int:
    units = max(0, min(most, int((limit_s - cost.start_s) / cost.unit_s)))
    while units < most and cost.time_s(units + 1) <= limit_s:  # the division may round down
        units += 1
    while units > 0 and cost.time_s(units) > limit_s:
        units -= 1
    return units


def _ideal_linear_s(num_units: int, costs: Sequence[RankCost]) -> float:
    """Ranks join in the order of their starts while they start before the end."""
    rate = begun = 0.0
    end_s = math.inf
    for c in sorted(costs, key=lambda c: c.start_s):
        if c.start_s >= end_s:
            break
        rate += 1 / c.unit_s
        begun += c.start_s / c.unit_s
        end_s = (num_units + begun) / rate
    return end_s


def _fraction_by(limit_s: float, cost: CompletionTime, num_units: int) -> float:
    uncapped = num_units if cost.cap is None else min(num_units, cost.cap)
    whole = most_units(limit_s, cost, uncapped)
    if whole >= uncapped:
        return whole
    begin_s, end_s = cost.time_s(whole), cost.time_s(whole + 1)
    part = (limit_s - begin_s) / (end_s - begin_s) if end_s > begin_s else 0.0
    return whole + max(0.0, part)


def _check_room(num_units: int, costs: Sequence[CompletionTime], least: int) -> None:
    if not costs:
        raise PlanError("no rank to place units on")
    caps = [c.cap for c in costs]
    if any(cap is not None and cap < least for cap in caps) or least * len(costs) > num_units:
        raise PlanError(
            f"{len(costs)} ranks with at least {least} of {num_units} units each do not fit; "
            "use fewer ranks"
        )
    if all(cap is not None for cap in caps):
        room = sum(cap or 0 for cap in caps)
        if room < num_units:
            raise PlanError(
                f"memory caps hold {room} units, {num_units} are needed; add ranks or memory"
            )


def _fill(
    shares: Sequence[int], num_units: int, costs: Sequence[CompletionTime]
) -> tuple[int, ...]:
    """Deal the units still missing, each to the rank that would finish it soonest."""
    result = _head_start(shares, num_units, costs)
    heap = [(c.time_s(result[i] + 1), i) for i, c in enumerate(costs) if _has_room(result[i], c)]
    heapq.heapify(heap)
    for _ in range(num_units - sum(result)):
        _, i = heap[0]
        result[i] += 1
        if _has_room(result[i], costs[i]):
            heapq.heapreplace(heap, (costs[i].time_s(result[i] + 1), i))
        else:
            heapq.heappop(heap)
    return tuple(result)


def _head_start(
    shares: Sequence[int], num_units: int, costs: Sequence[CompletionTime]
) -> list[int]:
    """Shares by a time before the optimum, or the given ones where few units are missing."""
    best = list(shares)
    few = _HEAP_UNITS_PER_RANK * len(costs)
    low, high = 0.0, max(c.time_s(most_units(math.inf, c, num_units)) for c in costs)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if num_units - sum(best) <= few or not low < middle < high:
            break
        tried = [
            max(n, most_units(middle, c, num_units)) for n, c in zip(shares, costs, strict=True)
        ]
        if sum(tried) > num_units:
            high = middle
        else:
            low, best = middle, tried
    return best


def _has_room(share: int, cost: CompletionTime) -> bool:
    return cost.cap is None or share < cost.cap
