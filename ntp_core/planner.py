"""Shares: how many units each rank takes so that the slowest finishes soonest.

Exact min-max for identical units and non-decreasing completion times: give the next unit to the
rank that would finish it soonest. Proof: let T be the optimum and k_i the most units rank i can
finish by T. While fewer than all units are placed and every n_i <= k_i, some rank still has room
below k_i and its next time is at most T; the chosen rank is no later, so n_i <= k_i keeps holding.
Largest remainder and similar roundings are not exact.

Pure arithmetic; no I/O.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from ntp_core.errors import PlanError
from ntp_core.plan import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCost:
    """Time of one rank as a function of its units: `start_s + units * unit_s`, at most `cap` units.

    Attributes:
        unit_s: seconds per unit, > 0.
        start_s: seconds it needs whatever its share, >= 0.
        cap: most units that fit its memory, or None.
    """

    unit_s: float
    start_s: float = 0.0
    cap: int | None = None

    def time_s(self, units: int) -> float:
        """Completion time with that many units."""
        return self.start_s + units * self.unit_s


def min_max_shares(
    num_units: int, costs: Sequence[RankCost], present: Sequence[int] | None = None, least: int = 0
) -> tuple[int, ...]:
    """Shares with the smallest possible largest completion time.

    Among all optima it takes one that moves the fewest units away from `present`.

    Args:
        num_units: units to place, >= 0.
        costs: one per rank.
        present: shares now, in the same order; None places from nothing.
        least: fewest units a rank may have.

    Raises:
        PlanError: when the caps leave units without place.
    """
    _check_room(num_units, costs, least)
    if present is None:
        return _fill([least] * len(costs), num_units, costs)
    best = max_time_s(_fill([least] * len(costs), num_units, costs), costs)
    kept = [
        max(least, min(have, _most_by(best, cost)))
        for have, cost in zip(present, costs, strict=True)
    ]
    while sum(kept) > num_units:  # only when `present` held more units than there are
        kept[kept.index(max(kept))] -= 1
    return _fill(kept, num_units, costs)


def max_time_s(shares: Sequence[int], costs: Sequence[RankCost]) -> float:
    """When the last rank finishes. A rank without units does not take part."""
    return max(
        (cost.time_s(n) for n, cost in zip(shares, costs, strict=True) if n > 0), default=0.0
    )


def ideal_time_s(num_units: int, costs: Sequence[RankCost]) -> float:
    """The bound that fractional units would reach, without caps: all ranks finish together."""
    speed = sum(1 / c.unit_s for c in costs)
    return (num_units + sum(c.start_s / c.unit_s for c in costs)) / speed


def keep_placement(shares: Sequence[int], present: Layout) -> Layout:
    """A layout with these shares in which every rank keeps as many of its units as it can.

    Units that must move come off the end of the giver's last run, so that runs stay few. The
    number of moved units is the least possible: the sum of what each rank gains.
    """
    held = [list(present.units(r)) for r in range(len(present.runs))]
    held += [[] for _ in range(len(shares) - len(held))]
    spare: list[int] = []
    for have, share in zip(held, shares, strict=True):
        spare += [have.pop() for _ in range(len(have) - share)]
    spare.sort()
    for have, share in zip(held, shares, strict=True):
        need = share - len(have)
        have += spare[:need] if need > 0 else []
        spare = spare[need:] if need > 0 else spare
    return Layout.of_units(held)


def _check_room(num_units: int, costs: Sequence[RankCost], least: int) -> None:
    if not costs:
        raise PlanError("no rank to place units on")
    if any(c.cap is not None and c.cap < least for c in costs) or least * len(costs) > num_units:
        raise PlanError(
            f"{len(costs)} ranks with at least {least} of {num_units} units each do not fit; "
            "use fewer ranks"
        )
    if all(c.cap is not None for c in costs):
        room = sum(c.cap or 0 for c in costs)
        if room < num_units:
            raise PlanError(
                f"memory caps hold {room} units, {num_units} are needed; add ranks or memory"
            )


def _most_by(time_s: float, cost: RankCost) -> int:
    most = max(0, int((time_s - cost.start_s) / cost.unit_s))
    while cost.time_s(most + 1) <= time_s:  # the division may round down
        most += 1
    while most > 0 and cost.time_s(most) > time_s:
        most -= 1
    return most if cost.cap is None else min(most, cost.cap)


def _fill(shares: Sequence[int], num_units: int, costs: Sequence[RankCost]) -> tuple[int, ...]:
    """Deal the units still missing, each to the rank that would finish it soonest."""
    result = list(shares)
    heap = [(c.time_s(result[i] + 1), i) for i, c in enumerate(costs) if _has_room(result[i], c)]
    heapq.heapify(heap)
    for _ in range(num_units - sum(result)):
        _, i = heapq.heappop(heap)
        result[i] += 1
        if _has_room(result[i], costs[i]):
            heapq.heappush(heap, (costs[i].time_s(result[i] + 1), i))
    return tuple(result)


def _has_room(share: int, cost: RankCost) -> bool:
    return cost.cap is None or share < cost.cap
