"""Shares of several kinds of units in one memory pool per rank: local moves, and exact search.

The exact search goes rank by rank through all shares that fit, and leaves a branch when the times
so far, or each kind's own optimum, are no better than the best known. Exponential: for small cases,
and bounded by the number of partial plans it visits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from ntp_core.planner import CompletionTime, min_max_shares
from ntp_core.units import UnitKind

_MOVES = 200
"""Most improving moves; each shortens the time or the list of slowest ranks."""

Shares = dict[UnitKind, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Units of several kinds and ranks with room for them.

    Attributes:
        counts: units of each kind.
        costs: kind -> time of each rank.
        unit_bytes: kind -> bytes of one unit.
        room_bytes: bytes of each rank for units.
    """

    counts: dict[UnitKind, int]
    costs: dict[UnitKind, tuple[CompletionTime, ...]]
    unit_bytes: dict[UnitKind, float]
    room_bytes: tuple[float, ...]

    def time_s(self, shares: Shares) -> float:
        """Sum over kinds of the slowest rank's time; every rank takes part in every barrier."""
        return sum(self.kind_s(k, n) for k, n in shares.items())

    def kind_s(self, kind: UnitKind, shares: tuple[int, ...]) -> float:
        """Time of one kind's slowest rank."""
        return max(c.time_s(n) for c, n in zip(self.costs[kind], shares, strict=True))

    def used_bytes(self, shares: Shares, rank: int) -> float:
        """Bytes of a rank's units."""
        return sum(self.unit_bytes[k] * n[rank] for k, n in shares.items())

    def fits(self, shares: Shares) -> bool:
        """Whether memory and caps hold."""
        return all(self._fits_rank(shares, i) for i in range(len(self.room_bytes)))

    def _fits_rank(self, shares: Shares, rank: int) -> bool:
        caps = ((self.costs[k][rank].cap, n[rank]) for k, n in shares.items())
        return self.used_bytes(shares, rank) <= self.room_bytes[rank] and all(
            cap is None or n <= cap for cap, n in caps
        )

    def improve(self, shares: Shares) -> Shares:
        """Moves and swaps of single units while they shorten the time or the slowest ranks."""
        for _ in range(_MOVES):
            now = self._rating(shares)
            better = next((s for s in self._changes(shares) if self._rating(s) < now), None)
            if better is None:
                break
            shares = better
        return shares

    def _rating(self, shares: Shares) -> tuple[float, int]:
        slowest = 0
        for kind, own in shares.items():
            longest = self.kind_s(kind, own)
            times = zip(self.costs[kind], own, strict=True)
            slowest += sum(c.time_s(n) >= longest for c, n in times)
        return self.time_s(shares), slowest

    def _changes(self, shares: Shares) -> Iterator[Shares]:
        """A unit off a slowest rank; if the receiver is full, others of another kind come back."""
        ranks = range(len(self.room_bytes))
        for kind, own in shares.items():
            longest = self.kind_s(kind, own)
            for giver in ranks:
                if not own[giver] or self.costs[kind][giver].time_s(own[giver]) < longest:
                    continue
                for taker in (i for i in ranks if i != giver):
                    yield from self._moves(shares, kind, giver, taker)

    def _moves(self, shares: Shares, kind: UnitKind, giver: int, taker: int) -> Iterator[Shares]:
        moved = shares | {kind: _moved(shares[kind], giver, taker, 1)}
        if self._fits_rank(moved, taker):
            yield moved
            return
        for other in (k for k in shares if k != kind and self.unit_bytes[k] > 0):
            lacking = self.used_bytes(moved, taker) - self.room_bytes[taker]
            back = max(1, -int(-lacking // self.unit_bytes[other]))
            if back <= shares[other][taker]:
                swapped = moved | {other: _moved(shares[other], taker, giver, back)}
                if self._fits_rank(swapped, taker) and self._fits_rank(swapped, giver):
                    yield swapped


def _moved(shares: tuple[int, ...], giver: int, taker: int, units: int) -> tuple[int, ...]:
    changed = list(shares)
    changed[giver] -= units
    changed[taker] += units
    return tuple(changed)


def search_shares(pool: Pool, best: Shares | None, nodes: int) -> tuple[Shares | None, bool]:
    """The optimum, and whether the search ended within `nodes` partial plans.

    Args:
        best: shares to beat, or None.
    """
    search = _Search(pool, best, nodes)
    search.visit([], dict(pool.counts), dict.fromkeys(pool.counts, 0.0))
    return search.best, search.nodes > 0


class _Search:
    """Depth-first over ranks; `nodes` counts down to 0, where the search gives up."""

    def __init__(self, pool: Pool, best: Shares | None, nodes: int) -> None:
        self.pool = pool
        self.best = best
        self.best_s = float("inf") if best is None else pool.time_s(best)
        self.nodes = nodes
        self.least_s = {
            k: pool.kind_s(k, min_max_shares(n, pool.costs[k])) for k, n in pool.counts.items()
        }

    def visit(
        self,
        chosen: list[dict[UnitKind, int]],
        missing: dict[UnitKind, int],
        times_s: dict[UnitKind, float],
    ) -> None:
        """Try all shares of the next rank; `times_s` are the slowest times so far."""
        pool, rank = self.pool, len(chosen)
        if rank == len(pool.room_bytes):
            self.best_s = sum(times_s.values())
            self.best = {k: tuple(c[k] for c in chosen) for k in pool.counts}
            return
        for own in self._shares_of(rank, missing):
            later = {k: n - own[k] for k, n in missing.items()}
            slowest = {k: max(t, pool.costs[k][rank].time_s(own[k])) for k, t in times_s.items()}
            bound = sum(max(t, self.least_s[k]) for k, t in slowest.items())
            if bound < self.best_s and self._has_room(rank + 1, later):
                self.visit([*chosen, own], later, slowest)

    def _shares_of(self, rank: int, missing: dict[UnitKind, int]) -> Iterator[dict[UnitKind, int]]:
        """Shares of one rank that fit it; the last rank takes what is missing."""
        pool = self.pool
        is_last = rank == len(pool.room_bytes) - 1
        caps = {k: pool.costs[k][rank].cap for k in missing}
        ranges = [
            range(n if is_last else 0, 1 + (n if (cap := caps[k]) is None else min(n, cap)))
            for k, n in missing.items()
        ]
        for shares in product(*ranges):
            self.nodes -= 1
            if self.nodes <= 0:
                return
            own = dict(zip(missing, shares, strict=True))
            if sum(pool.unit_bytes[k] * n for k, n in own.items()) <= pool.room_bytes[rank]:
                yield own

    def _has_room(self, rank: int, missing: dict[UnitKind, int]) -> bool:
        need = sum(self.pool.unit_bytes[k] * n for k, n in missing.items())
        return need <= sum(self.pool.room_bytes[rank:]) * (1 + 1e-12)
