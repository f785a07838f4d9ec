"""Finds the rank that can carry more than the plan in force gives it: it was slow, and is no more.

The mirror of the check for slow ranks, and no check: nothing is wrong. A plan made for a slow rank
gives it little and expects it to need long for that; one that needs clearly less, for many steps,
is fast again. A rank of which the plan expects as much as of its peers is let be, however fast.
Each return of the same rank makes the next one wait twice as long, so that a rank that turns slow
again and again does not make the shares go to and fro.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean, median, median_low

from ntp_core.plan import Plan
from sidecar.checks.finding import Finding, Severity
from sidecar.ingest.state import JobState, RankState

MAX_DOUBLINGS = 4
MAX_REMEMBERED = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class ReturnLimits:
    """When a rank counts as fast again.

    Attributes:
        steps: newest steps of the plan in force that it is judged by; 0 turns it off.
        ratio: how many times slower than its peers the plan must expect it to be, and how many
            times less than expected it must need, next to them.
        hold_s: after a return of a rank, least time to its next one; doubled by each.
    """

    steps: int = 16
    ratio: float = 1.25
    hold_s: float = 60.0


@dataclass(slots=True)
class Returns:
    """Remembers who was given shares back, and what was looked at last."""

    limits: ReturnLimits = field(default_factory=ReturnLimits)
    _given: dict[int, tuple[int, int]] = field(default_factory=dict)  # rank -> times, not before
    _looked: tuple[str, int] = ("", -1)  # digest, number of the window

    def due(self, job: JobState, now_ns: int) -> Finding | None:
        """The rank that is faster than the plan expects by most, if that is enough. One that was
        given back to a short while ago has to wait."""
        if job.plan is None or not self.limits.steps:
            return None
        window = (job.plan.digest, job.step // self.limits.steps)
        if window == self._looked:
            return None
        ratios = _ratios(job.members, job.plan.epoch, self.limits.steps)
        if not ratios:
            return None
        self._looked = window
        spared = _spared(job.members, job.plan, self.limits.ratio)
        rank = min(spared & ratios.keys(), key=lambda r: ratios[r], default=None)
        if rank is None:
            return None
        _, not_before_ns = self._given.get(rank, (0, 0))
        if ratios[rank] * self.limits.ratio > 1.0 or now_ns < not_before_ns:
            return None
        return _finding(job, rank, ratios[rank])

    def given(self, rank: int, now_ns: int, least_s: float = 0.0) -> None:
        """Shares go back to this rank now; `least_s` where it brought nothing the last time."""
        times = self._given.pop(rank, (0, 0))[0] + (not least_s)
        hold_s = self.limits.hold_s * 2 ** min(times - 1, MAX_DOUBLINGS) if times else 0.0
        self._given[rank] = times, now_ns + int(max(hold_s, least_s) * 1e9)
        while len(self._given) > MAX_REMEMBERED:
            del self._given[next(iter(self._given))]


def _ratios(members: Iterable[RankState], epoch: int, steps: int) -> dict[int, float]:
    """Each rank's time over what its peers would need for its share; empty unless every member with
    a share has made so many steps under the plan in force."""
    costs: dict[int, float] = {}
    for r in members:
        if not r.work:
            continue
        newest = [s for s in list(r.steps)[-steps:] if s.epoch == epoch and s.work]
        if r.alive is False or len(newest) < steps:
            return {}
        costs[r.rank] = median(s.own_ns / (s.work or 1.0) for s in newest)
    norm = median_low(costs.values()) if len(costs) > 1 else 0.0
    return {g: c / norm for g, c in costs.items()} if norm > 0 else {}


def _spared(members: Iterable[RankState], plan: Plan, ratio: float) -> set[int]:
    """Ranks that the plan expects to be slow: they have few units for the time it gives them."""
    work = {r.rank: r.work for r in members if r.work}
    speeds = {}
    for replica in plan.replicas:
        for index, g in enumerate(replica.ranks):
            if g in work:
                parts = [v.shares[index] / sum(v.shares) for v in replica.layouts.values()]
                speeds[g] = replica.batch * fmean(parts) / work[g]
    norm = median(speeds.values()) if speeds else 0.0
    return {g for g, speed in speeds.items() if speed * ratio < norm}


def _finding(job: JobState, rank: int, ratio: float) -> Finding:
    return Finding(
        check="slow_rank",
        subject=f"rank {rank}",
        severity=Severity.INFO,
        summary=f"Rank {rank} needs {ratio:.2g} of the time that the plan expects of it.",
        rank=rank,
        step=job.step,
    )
