"""Completion times of ranks whose speed is not one number.

A matmul is bound by arithmetic, the optimizer or a decode step by memory: one rank may be slow in
one and not in the other. A phase therefore counts operations and bytes, and a rank takes the longer
of both (the roofline of Williams et al., CACM 52(4), 2009). What a kernel really does comes in
steps (tiles, waves); such times are given as tables. All of them are non-decreasing, which is what
`ntp_core.planner.min_max_shares` needs to be exact.

Pure arithmetic; no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from ntp_core.cost import Work
from ntp_core.errors import InvalidInput
from ntp_core.planner import CompletionTime, RankCost
from ntp_core.units import UnitKind

COMPUTE = "compute"
"""Name of the one phase that plain `Work` stands for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """What one sequence asks of a replica between two points where nothing overlaps.

    Attributes:
        name: key of the measured speeds in `RankSpeed.phases`.
        flops: kind -> operations of one unit, all layers together, per sequence.
        moved_bytes: kind -> bytes of one unit read and written in the rank's memory, per sequence.
        rank_flops: operations that every rank does whatever its share.
        rank_bytes: bytes that every rank moves whatever its share.
    """

    name: str
    flops: Mapping[UnitKind, float]
    moved_bytes: Mapping[UnitKind, float] = field(default_factory=dict)
    rank_flops: float = 0.0
    rank_bytes: float = 0.0


def phases_of_work(work: Work) -> tuple[Phase, ...]:
    """Plain work as one phase that is bound by arithmetic."""
    return (Phase(name=COMPUTE, flops=work.unit, rank_flops=work.rank),)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpeed:
    """How fast a rank is, measured. Units are those of the phases; with `Work` only ratios matter.

    Attributes:
        flops_per_s: operations per second, > 0.
        bytes_per_s: bytes of its own memory per second, > 0; infinite where it never binds.
        phases: phase name -> operations per second measured in that phase; it stands in for the
            roofline there.
    """

    flops_per_s: float
    bytes_per_s: float = math.inf
    phases: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rates = {"flops_per_s": self.flops_per_s, "bytes_per_s": self.bytes_per_s, **self.phases}
        for name, rate in rates.items():
            if not rate > 0:
                raise InvalidInput(f"{name} = {rate!r}; a rank that works has a speed > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTime:
    """Seconds of one phase on one rank: the longer of two lines over its units."""

    flops_s: float
    flops_start_s: float = 0.0
    moved_s: float = 0.0
    moved_start_s: float = 0.0

    def time_s(self, units: int) -> float:
        """Time with that many units."""
        by_flops = self.flops_start_s + units * self.flops_s
        return max(by_flops, self.moved_start_s + units * self.moved_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflineCost:
    """Phases one after the other, each bound by arithmetic or by memory."""

    phases: tuple[PhaseTime, ...]
    start_s: float = 0.0
    cap: int | None = None

    def time_s(self, units: int) -> float:
        """Completion time with that many units."""
        return self.start_s + sum(p.time_s(units) for p in self.phases)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """A table of times by units, made non-decreasing. Build it with `StepCost.of`.

    With wave quantisation 9 units may take longer than 10 (a tail wave of another tile shape). A
    rank can then always be given the time of the larger share, so the running maximum bounds what
    any share up to that takes, and the min-max over it is exact for that bound.

    Attributes:
        times_s: completion time of 0, 1, 2, ... units.
    """

    times_s: tuple[float, ...]

    @classmethod
    def of(cls, time_of: Callable[[int], float], most: int) -> StepCost:
        """From measured or modelled times of 0 to `most` units."""
        return cls(times_s=tuple(accumulate((time_of(n) for n in range(most + 1)), max)))

    @property
    def cap(self) -> int:
        """Largest share the table knows."""
        return len(self.times_s) - 1

    def time_s(self, units: int) -> float:
        """Completion time with that many units, at most `cap`."""
        return self.times_s[units]


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlockCost:
    """Units that use a block together, copied to every rank that holds one of them.

    With query heads as units, each rank keeps and computes the KV heads its query heads use. A run
    of n consecutive units touches at most ceil((n - 1) / sharing) + 1 blocks; that bound is used,
    so a share never takes longer than predicted, wherever its run begins.

    Attributes:
        units: time of the units alone.
        sharing: consecutive units that use one block (query heads per KV head), >= 1.
        blocks: number of blocks in all.
        block_s: seconds per block that a rank keeps.
    """

    units: CompletionTime
    sharing: int
    blocks: int
    block_s: float

    @property
    def cap(self) -> int | None:
        """Most units that fit."""
        return self.units.cap

    def touched(self, units: int) -> int:
        """Most blocks that so many consecutive units may touch."""
        return min(self.blocks, (units + 2 * self.sharing - 2) // self.sharing) if units else 0

    def time_s(self, units: int) -> float:
        """Completion time with that many units."""
        return self.units.time_s(units) + self.block_s * self.touched(units)


def kind_costs(
    kind: UnitKind,
    counts: Mapping[UnitKind, int],
    phases: Sequence[Phase],
    speeds: Sequence[RankSpeed],
    fixed_s: Sequence[float],
) -> list[CompletionTime]:
    """Time of each rank for its units of one kind, per sequence.

    What every rank does whatever its share goes with the kinds in proportion to their size, so that
    each barrier sees its part of a slow rank's fixed cost.

    Args:
        counts: units of each kind.
        speeds, fixed_s: of each rank; fixed seconds per sequence.
    """
    shares = [_share_of_kind(kind, counts, p.flops) for p in phases]
    moved = [_share_of_kind(kind, counts, p.moved_bytes) for p in phases]
    even = sum(shares) / len(shares)
    if len(phases) == 1 and not phases[0].moved_bytes and not phases[0].rank_bytes:
        unit, part = phases[0].flops.get(kind, 0.0), phases[0].rank_flops * shares[0]
        rates = [v.phases.get(phases[0].name, v.flops_per_s) for v in speeds]
        return [
            RankCost(unit_s=unit / rate, start_s=fixed * even + part / rate)
            for rate, fixed in zip(rates, fixed_s, strict=True)
        ]
    return [
        _linear(
            tuple(
                _phase_time(kind, p, speed, a, b)
                for p, a, b in zip(phases, shares, moved, strict=True)
            ),
            fixed * even,
        )
        for speed, fixed in zip(speeds, fixed_s, strict=True)
    ]


def _share_of_kind(
    kind: UnitKind, counts: Mapping[UnitKind, int], per_unit: Mapping[UnitKind, float]
) -> float:
    total = sum(per_unit.get(k, 0.0) * n for k, n in counts.items())
    return per_unit.get(kind, 0.0) * counts[kind] / total if total else 0.0


def _phase_time(
    kind: UnitKind, phase: Phase, speed: RankSpeed, flops_share: float, bytes_share: float
) -> PhaseTime:
    measured = speed.phases.get(phase.name)
    rate = speed.flops_per_s if measured is None else measured
    bandwidth = speed.bytes_per_s if measured is None else math.inf
    return PhaseTime(
        flops_s=phase.flops.get(kind, 0.0) / rate,
        flops_start_s=phase.rank_flops * flops_share / rate,
        moved_s=phase.moved_bytes.get(kind, 0.0) / bandwidth,
        moved_start_s=phase.rank_bytes * bytes_share / bandwidth,
    )


def _linear(phases: tuple[PhaseTime, ...], start_s: float) -> CompletionTime:
    """A plain line where no phase changes what it is bound by: the fast and common case."""
    unit_s = begin_s = 0.0
    for p in phases:
        if p.flops_s >= p.moved_s and p.flops_start_s >= p.moved_start_s:
            unit_s, begin_s = unit_s + p.flops_s, begin_s + p.flops_start_s
        elif p.flops_s <= p.moved_s and p.flops_start_s <= p.moved_start_s:
            unit_s, begin_s = unit_s + p.moved_s, begin_s + p.moved_start_s
        else:
            return RooflineCost(phases=phases, start_s=start_s)
    return RankCost(unit_s=unit_s, start_s=start_s + begin_s)
