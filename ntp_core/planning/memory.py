"""Shares that fit memory: one pool per rank for all kinds of units.

Time alone decides while everything fits. When it does not, the kinds compete for the pool of each
rank, and the shares of one kind depend on those of the others. Kinds are then placed one after the
other, the scarcest first and every other order too, each once with all the room that is left and
once with its proportional part of it; the best is improved by moves and swaps of single units. In
small cases a bounded search (`SEARCH_NODES` partial plans) proves the optimum or finds it.

Bound: no shares can be faster than each kind's own optimum without memory limits, so the result is
at most `gap` above the best possible; it is optimal when `is_exact`.

Pure arithmetic; no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from ntp_core.errors import PlanError
from ntp_core.planner import CappedCost, CompletionTime, min_max_shares
from ntp_core.planning.search import Pool, Shares, search_shares
from ntp_core.units import ModelUnits, UnitKind, block_numel

GIB = float(1 << 30)
SEARCH_NODES = 20_000
"""Partial plans that the exact search may try, about 0.1 s; 0 turns it off."""

SEARCH_UNITS = 200
"""Units times ranks up to which the search has a chance to end."""

_ORDERS_UP_TO = 4
"""Kinds whose orders are all tried (4! = 24); with more, only the scarcest first."""

_IMPROVED = 2
"""Placements that are improved by moves and swaps, best first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryNeed:
    """Bytes that a plan needs on a rank: `rank + sum over kinds of units * unit`.

    Attributes:
        unit: kind -> bytes of one unit, all layers together.
        rank: bytes that every rank holds whatever its share.
    """

    unit: Mapping[UnitKind, float]
    rank: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StateBytes:
    """Bytes kept for each element of a parameter, and for activations.

    Attributes:
        weight, gradient, optimizer: bytes per element; the defaults are float32 weights and
            gradients with the two float32 moments of AdamW.
        activation: kind -> bytes of activations of one unit, of all sequences in flight.
        rank_activation: bytes of activations and buffers that every rank holds.
    """

    weight: float = 4.0
    gradient: float = 4.0
    optimizer: float = 8.0
    activation: Mapping[UnitKind, float] = field(default_factory=dict)
    rank_activation: float = 0.0

    @property
    def per_element(self) -> float:
        """Bytes per element of a parameter."""
        return self.weight + self.gradient + self.optimizer


def memory_of_model(model: ModelUnits, state: StateBytes) -> MemoryNeed:
    """What units and ranks need, from the sizes of the tensors.

    A block that `sharing` units use together is counted in equal parts to them. A run of units may
    touch fewer than 2 - 2 / sharing blocks more than that, so each rank is charged that much.
    """
    unit = {k: state.activation.get(k, 0.0) for k in model.counts}
    rank = state.rank_activation
    for t in model.tensors:
        size = t.numel * state.per_element
        if t.kind is None:
            rank += size
            continue
        unit[t.kind] += size / model.counts[t.kind]
        block = block_numel(t, model.counts[t.kind], 0) * state.per_element
        rank += block * (2 - 2 / t.sharing)
    return MemoryNeed(unit=unit, rank=rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """A rank and the bytes it can use; infinite where memory never binds."""

    rank: int
    size_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """Shares of all kinds that fit.

    Attributes:
        shares: kind -> units of each rank.
        time_s: sum over kinds of the slowest rank's time.
        lower_bound_s: the same without memory limits; nothing is faster.
        is_exact: whether nothing that fits is faster.
    """

    shares: Shares
    time_s: float
    lower_bound_s: float
    is_exact: bool

    @property
    def gap(self) -> float:
        """The most by which better shares could be faster, as a part of the lower bound."""
        return self.time_s / self.lower_bound_s - 1 if self.lower_bound_s else 0.0


def shares_in_memory(
    counts: Mapping[UnitKind, int],
    costs: Mapping[UnitKind, Sequence[CompletionTime]],
    need: MemoryNeed,
    ranks: Sequence[RankMemory],
    present: Mapping[UnitKind, Sequence[int]] | None = None,
    search_nodes: int = SEARCH_NODES,
) -> MemoryShares:
    """The fastest shares found whose bytes fit every rank.

    Args:
        counts: units of each kind.
        costs: kind -> time of each rank; caps of its own are kept.
        need: bytes per unit and per rank.
        ranks: memory, in the order of the costs.
        present: shares now; where memory does not bind, ties keep them.
        search_nodes: bound of the exact search.

    Raises:
        PlanError: naming a rank, its memory, what does not fit, and what to do.
    """
    _check_memory(counts, need, ranks)
    have = present or {}
    free = {
        k: min_max_shares(n, costs[k], have.get(k), floor_s=max(c.time_s(0) for c in costs[k]))
        for k, n in counts.items()
    }
    pool = Pool(
        counts=dict(counts),
        costs={k: tuple(costs[k]) for k in counts},
        unit_bytes={k: need.unit.get(k, 0.0) for k in counts},
        room_bytes=tuple(r.size_bytes - need.rank for r in ranks),
    )
    lower_s = pool.time_s(free)
    if pool.fits(free):
        return MemoryShares(shares=free, time_s=lower_s, lower_bound_s=lower_s, is_exact=True)
    best = _place_in_orders(pool)
    is_exact = best is not None and pool.time_s(best) <= lower_s
    if not is_exact and sum(counts.values()) * len(ranks) <= SEARCH_UNITS:
        best, is_exact = search_shares(pool, best, search_nodes)
    if best is None:
        raise PlanError(_fragments(pool, ranks, is_proven=is_exact))
    return MemoryShares(
        shares=best, time_s=pool.time_s(best), lower_bound_s=lower_s, is_exact=is_exact
    )


def _place_in_orders(pool: Pool) -> Shares | None:
    """The best of all orders of kinds, after moves and swaps; None when no order fits."""
    placed = [_place(pool, order, split) for order in _orders(pool) for split in (False, True)]
    fitting = [s for s in placed if s is not None and pool.fits(s)]  # a cap may be rounded up
    fitting.sort(key=pool.time_s)
    return min((pool.improve(s) for s in fitting[:_IMPROVED]), key=pool.time_s, default=None)


def _orders(pool: Pool) -> Iterator[tuple[UnitKind, ...]]:
    """Scarcest first: the kind that needs the most bytes, large units before small ones."""
    scarce = sorted(pool.counts, key=lambda k: -pool.unit_bytes[k] * pool.counts[k])
    by_size = sorted(pool.counts, key=lambda k: -pool.unit_bytes[k])
    yield from (
        permutations(scarce)
        if len(scarce) <= _ORDERS_UP_TO
        else (
            tuple(scarce),
            tuple(by_size),
        )
    )


def _place(pool: Pool, order: Sequence[UnitKind], is_split: bool) -> Shares | None:
    """Kinds one after the other in what is left, or each in its part of what is left."""
    left = list(pool.room_bytes)
    placed: Shares = {}
    for index, kind in enumerate(order):
        size = pool.unit_bytes[kind]
        rest = sum(pool.unit_bytes[k] * pool.counts[k] for k in order[index:])
        part = size * pool.counts[kind] / rest if is_split and rest else 1.0
        costs = [
            _capped(c, room, size, part) for c, room in zip(pool.costs[kind], left, strict=True)
        ]
        try:
            placed[kind] = min_max_shares(pool.counts[kind], costs)
        except PlanError:
            return None
        left = [room - n * size for room, n in zip(left, placed[kind], strict=True)]
    return placed


def _capped(cost: CompletionTime, room: float, size: float, part: float) -> CompletionTime:
    if not size or math.isinf(room):
        return cost
    units = math.ceil(room * part / size - 1e-9) if part < 1 else math.floor(room / size)
    units = min(units, math.floor(room / size))
    return CappedCost(cost=cost, cap=units if cost.cap is None else min(cost.cap, units))


def _check_memory(
    counts: Mapping[UnitKind, int], need: MemoryNeed, ranks: Sequence[RankMemory]
) -> None:
    for r in ranks:
        if r.size_bytes < need.rank:
            raise PlanError(
                f"rank {r.rank} has {_gib(r.size_bytes)}; what every rank holds (replicated "
                f"parameters, buffers) takes {_gib(need.rank)}. Leave the rank out, or shorten "
                "micro-batches"
            )
    units = sum(need.unit.get(k, 0.0) * n for k, n in counts.items())
    room = sum(r.size_bytes - need.rank for r in ranks)
    if units > room:
        least = min(ranks, key=lambda r: r.size_bytes)
        kinds = ", ".join(f"{k} {_gib(need.unit.get(k, 0.0) * n)}" for k, n in counts.items())
        raise PlanError(
            f"ranks {[r.rank for r in ranks]} have {_gib(room)} for units, which take "
            f"{_gib(units)} ({kinds}); the smallest is rank {least.rank} with "
            f"{_gib(least.size_bytes)}. Add ranks or memory: {_gib(units - room)} are missing; or "
            "shorten micro-batches, or recompute activations"
        )


def _fragments(pool: Pool, ranks: Sequence[RankMemory], is_proven: bool) -> str:
    kind = max(pool.counts, key=lambda k: pool.unit_bytes[k])
    index = max(range(len(ranks)), key=lambda i: pool.room_bytes[i] % (pool.unit_bytes[kind] or 1))
    said = "do not fit" if is_proven else "were not found to fit"
    return (
        f"units {said} the ranks {[r.rank for r in ranks]}, though their bytes would: one {kind} "
        f"unit takes {_gib(pool.unit_bytes[kind])}, and rank {ranks[index].rank} with "
        f"{_gib(ranks[index].size_bytes)} is left with a part of one. Cut {kind} into smaller "
        "units, or free some memory"
    )


def _gib(size: float) -> str:
    return f"{size / GIB:.4g} GiB"
