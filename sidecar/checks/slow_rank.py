"""Finds the rank that needs longer for its share of the plan than its peers for theirs.

Time in the run queue of a crowded host does not count as a rank's own, as it hits now this rank and
now that; only a rank that it holds up for many steps on end is named, and then for that.

It names the culprit and never those who wait for it: only a rank's own busy time counts, divided by
the work the plan gives it (`sidecar.ingest.slowness`). When more than half of the ranks have become
slow the fault is the job's, not a rank's, and the check says nothing.

The share is the expected one: a plan made for unequal speeds expects a slow rank to need longer,
and the rank is judged against that. So a rank that was given what it can carry is no longer slow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import median, median_low

from sidecar.checks.finding import Finding, Severity
from sidecar.ingest.slowness import slowness
from sidecar.ingest.state import JobState, RankState, StepSample

HISTORY_STEPS = 32
"""Earlier steps of the epoch that a rank's own norm is taken from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowRankLimits:
    """When a rank is slow.

    Attributes:
        threshold: ratio to the peers that starts a finding.
        clear: ratio under which it ends; lower, so that a rank at the border does not flap.
        steps: consecutive committed steps that must all be over the threshold.
        warmup_steps: steps ignored at the start of each epoch.
        min_ranks: fewer comparable ranks than this cannot be judged.
        crowded_steps: consecutive steps over the threshold, run queue included, that name a rank
            whose host has too few processors for it.
        min_excess: least time lost, as a fraction of the step time: a rank with next to no work
            may be slow for it and hold nobody up.
    """

    threshold: float = 1.5
    clear: float = 1.25
    steps: int = 3
    warmup_steps: int = 2
    min_ranks: int = 3
    min_excess: float = 0.05
    crowded_steps: int = 20


@dataclass(slots=True, kw_only=True)
class _Table:
    """The newest common steps: for each, rank -> sample, oldest first. `epoch` holds for all."""

    epoch: int
    steps: list[dict[int, StepSample]]


@dataclass(slots=True)
class SlowRank:
    """The check. It remembers whom it blamed, for the hysteresis, and what it judged last."""

    limits: SlowRankLimits = field(default_factory=SlowRankLimits)
    name: str = "slow_rank"
    _judged: tuple[int, int] = (-1, -1)  # (epoch, step)
    _findings: list[Finding] = field(default_factory=list)

    def applies(self, job: JobState) -> bool:
        """Ranks of a plan can be compared; True before the job could have a plan."""
        if job.plan is None:
            return not job.has_trained
        return len(job.plan.ranks) >= self.limits.min_ranks

    def ready(self, job: JobState) -> bool:
        """True with enough ranks and enough steps behind the warm-up of the present epoch."""
        return _table(job, self.limits) is not None

    def run(self, job: JobState, now_ns: int) -> list[Finding]:
        """Findings by the newest common steps; those of last time while there is no newer step."""
        del now_ns  # steps are the clock of this check
        table = _table(job, self.limits)
        if table is None:
            return list(self._findings)
        key = (table.epoch, max(s.step for s in table.steps[-1].values()))
        if key != self._judged:
            self._judged = key
            self._findings = self._judge(job, table)
        return list(self._findings)

    def _judge(self, job: JobState, table: _Table) -> list[Finding]:
        return self._slow(job, table) or _crowded(job, self.limits)

    def _slow(self, job: JobState, table: _Table) -> list[Finding]:
        ratios = [_ratios(samples) for samples in table.steps]
        blamed = {f.rank for f in self._findings}
        suspects = [r for r in table.steps[-1] if self._is_slow(r, r in blamed, ratios)]
        if not suspects or 2 * len(suspects) > len(table.steps[-1]):
            return []
        suspects = [r for r in suspects if r in blamed or self._is_harmful(r, table)]
        if not suspects or _is_job_wide(job, table, self.limits):
            return [f for f in self._findings if f.rank in suspects]
        by_share = slowness(job)
        return [
            _finding(job, table, rank, by_share.get(rank, median(r[rank] for r in ratios)))
            for rank in suspects
            if rank in blamed or by_share.get(rank, 0) >= self.limits.clear
        ]

    def _is_slow(self, rank: int, is_blamed: bool, ratios: list[dict[int, float]]) -> bool:
        own = [r[rank] for r in ratios]
        if is_blamed:
            return median(own) >= self.limits.clear
        return min(own) >= self.limits.threshold

    def _is_harmful(self, rank: int, table: _Table) -> bool:
        lost, steps = [], []
        for samples in table.steps:
            ratio = _ratios(samples)[rank]
            lost.append(samples[rank].own_ns * (1 - 1 / ratio))
            steps.append(median(s.duration_ns for s in samples.values()))
        return median(lost) >= self.limits.min_excess * median(steps)


def _table(job: JobState, limits: SlowRankLimits) -> _Table | None:
    """The newest `limits.steps` consecutive steps that all comparable ranks committed."""
    ranks = [r for r in job.members if r.alive is not False and r.exited is None and r.work]
    if len(ranks) < limits.min_ranks:
        return None
    epoch = max(r.epoch for r in ranks)
    columns = [_newest(r, epoch, limits) for r in ranks]
    newest = min((max(c, default=-1) for c in columns), default=-1)
    wanted = range(newest - limits.steps + 1, newest + 1)
    if newest < 0 or any(step not in c for c in columns for step in wanted):
        return None
    steps = [{r.rank: c[step] for r, c in zip(ranks, columns, strict=True)} for step in wanted]
    return _Table(epoch=epoch, steps=steps)


def _newest(rank: RankState, epoch: int, limits: SlowRankLimits) -> dict[int, StepSample]:
    """The rank's newest samples of the epoch, by step, without the warm-up."""
    room = limits.warmup_steps + limits.steps + 2  # 2: ranks need not be in the same step
    samples: list[StepSample] = []
    for sample in reversed(rank.steps):
        if sample.epoch != epoch:
            return {s.step: s for s in samples[: max(0, len(samples) - limits.warmup_steps)]}
        if len(samples) == room:
            return {s.step: s for s in samples if s.work}
        samples.append(sample)
    return {s.step: s for s in samples[: max(0, len(samples) - limits.warmup_steps)] if s.work}


def _ratios(samples: dict[int, StepSample]) -> dict[int, float]:
    """Each rank's time over what its peers would need for its share.

    The lower median is the norm: with an even number of ranks the middle then lies on a measured
    rank of the faster half, and two slow ranks of four are still seen.
    """
    costs = {r: s.own_ns / (s.work or 1.0) for r, s in samples.items()}
    norm = median_low(costs.values())
    return {r: c / norm if norm > 0 else 1.0 for r, c in costs.items()}


def _is_job_wide(job: JobState, table: _Table, limits: SlowRankLimits) -> bool:
    """More than half of the ranks are slow against their own past in this epoch.

    The past is short: a new level becomes the norm, and a rank that stands out from it is named.
    """
    first = min(s.step for s in table.steps[0].values())
    slower = judged = 0
    for rank, newest in table.steps[-1].items():
        past = [
            s.own_ns / s.work
            for s in list(job.ranks[rank].steps)[-HISTORY_STEPS - limits.steps :]
            if s.work and s.epoch == table.epoch and s.step < first
        ]
        if len(past) > limits.warmup_steps:
            judged += 1
            slower += newest.own_ns / (newest.work or 1.0) >= limits.threshold * median(past)
    return judged > 0 and 2 * slower > len(table.steps[-1])


def _crowded(job: JobState, limits: SlowRankLimits) -> list[Finding]:
    """The rank that its host's run queue held up in every one of many steps, if just one."""
    room = limits.crowded_steps
    columns = {
        r.rank: {s.step: s for s in list(r.steps)[-room - 2 :] if s.work and s.epoch == r.epoch}
        for r in job.members
        if r.alive is not False and r.exited is None and r.work
    }
    common = sorted(set.intersection(*(set(c) for c in columns.values())))[-room:]
    if len(common) < room:
        return []
    worst: dict[int, float] = {}
    for step in common:
        costs = {r: c[step].busy_ns / (c[step].work or 1.0) for r, c in columns.items()}
        norm = median_low(costs.values())
        for rank, cost in costs.items():
            worst[rank] = min(worst.get(rank, math.inf), cost / norm if norm > 0 else 1.0)
    held_up = [r for r, ratio in worst.items() if ratio >= limits.threshold]
    return [_crowded_finding(job, held_up[0], worst, common)] if len(held_up) == 1 else []


def _crowded_finding(
    job: JobState, rank: int, worst: dict[int, float], common: list[int]
) -> Finding:
    newest = [s for s in job.ranks[rank].steps if s.step in common]
    queued_s = median(s.queued_ns for s in newest) / 1e9
    return Finding(
        check="slow_rank",
        subject=f"rank {rank}",
        severity=Severity.WARNING,
        summary=(
            f"Rank {rank} waits {queued_s:.3g} s per step for a processor of its host, in each of "
            f"the last {len(common)} steps; give it a core of its own."
        ),
        signals={
            "slowness": f"at least {worst[rank]:.2f}x its peers, run queue included",
            "run_queue": f"{queued_s:.4g} s per step",
            "steps_judged": f"{common[0]} to {common[-1]}",
        },
        rank=rank,
        replica=job.ranks[rank].replica,
        step=common[-1],
    )


def _finding(job: JobState, table: _Table, rank: int, ratio: float) -> Finding:
    newest = table.steps[-1]
    own, state = newest[rank], job.ranks[rank]
    busy_s = median(s[rank].own_ns for s in table.steps) / 1e9
    peers = [s for r, s in newest.items() if r != rank]
    norm = median_low(s.own_ns / (s.work or 1.0) for s in peers) * (own.work or 0.0) / 1e9
    return Finding(
        check="slow_rank",
        subject=f"rank {rank}",
        severity=Severity.WARNING,
        summary=(
            f"Rank {rank} needs {busy_s:.3g} s of its own work per step for its share of "
            f"{100 * (own.work or 0):.1f} %; its peers would need {norm:.3g} s for it."
        ),
        signals={
            "slowness": f"{ratio:.2f}x its peers",
            "busy_time": f"{busy_s:.4g} s per step, without the run queue",
            "share": f"{100 * (own.work or 0):.1f} % of the job's own time is expected of it",
            "peers_median": f"{norm:.4g} s for the same share",
            "step_time": f"{median(s.duration_ns for s in newest.values()) / 1e9:.4g} s",
            "steps_judged": f"{table.steps[0][rank].step} to {own.step}",
        },
        rank=rank,
        replica=state.replica,
        step=own.step,
    )
