"""Judges an allocation change by what it brought: step times before and after.

A committed change gets both times when enough steps follow it. If it was made on a promise and the
job is not faster by a margin, it counts as undone: the caller leaves a proposal for the way back,
and a finding says so. Pure: state in, verdicts out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from ntp_core.observe import ChangeStatus, Reason
from ntp_core.proposal import Proposal
from sidecar.checks.finding import Finding, Severity
from sidecar.ingest.state import Change, JobState, StepSample

MIN_BEFORE = 3
"""Fewest steps before the change that make a time."""
MAX_BEFORE = 64
"""Most steps before it: an incident may be much older."""
NOTICE_NS = 30_000_000_000
"""How long the finding about a change without gain holds, if no other change ends it."""
MAX_NOTICES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeLimits:
    """How a change is judged.

    Attributes:
        skip: steps after the change that are not counted (caches, new communicators).
        steps: steps after those that are.
        margin: least gain, as a fraction of the time before, that counts as one.
    """

    skip: int = 2
    steps: int = 5
    margin: float = 0.02


@dataclass(slots=True)
class ChangeJudge:
    """Judges each change once, and keeps notices about those without gain."""

    limits: JudgeLimits = field(default_factory=JudgeLimits)
    _notices: deque[tuple[int, Finding]] = field(default_factory=lambda: deque(maxlen=MAX_NOTICES))

    def judge(
        self,
        job: JobState,
        promises: Mapping[int, Proposal],
        opened: Mapping[str, int],
        *,
        now_ns: int,
    ) -> list[Change]:
        """Judge what can be judged now.

        Args:
            job: the state; verdicts are written into its changes.
            promises: epoch -> the proposal that the change of that epoch followed.
            opened: incident id -> step at which it opened.
            now_ns: monotonic clock, for how long a notice holds.

        Returns:
            Changes that were found to have brought nothing in this call.
        """
        undone = []
        for change in job.changes:
            if not _is_open(change):
                continue
            promise = promises.get(change.epoch)
            if promise is not None and change.step_time_ideal_s is None:
                change.step_time_ideal_s = promise.ideal_step_s or None
            after = _after(job, change, self.limits)
            if after is None:
                continue
            change.step_time_before_s = _before(job, change, opened.get(change.incident or "", -1))
            change.step_time_after_s = after
            if promise is None or promise.promised_step_s <= 0:
                continue
            if self._verdict(change) == "undone":
                undone.append(change)
                self._notices.append((now_ns, _notice(change, promise)))
        return undone

    def _verdict(self, change: Change) -> str | None:
        before, after = change.step_time_before_s, change.step_time_after_s
        if before is not None and after is not None:
            change.judged = "undone" if after > before * (1 - self.limits.margin) else "kept"
        return change.judged

    def findings(self, job: JobState, now_ns: int) -> list[Finding]:
        """Notices about changes without gain, until another change is in force or time is up."""
        epoch = job.plan.epoch if job.plan is not None else 0
        return [
            f
            for since, f in self._notices
            if now_ns - since < NOTICE_NS and f.subject == f"change {epoch}"
        ]


def _is_open(change: Change) -> bool:
    """Committed and without a time after it. The first plan of a job is no change to judge."""
    return (
        change.status is ChangeStatus.COMMITTED
        and change.step_time_after_s is None
        and change.reason is not Reason.START
    )


def _after(job: JobState, change: Change, limits: JudgeLimits) -> float | None:
    """Median step time of the steps that judge the change; None while there are too few."""
    first = change.step + 1 + limits.skip
    times = _step_times(job, first, first + limits.steps, range(change.epoch, change.epoch + 1))
    return median(times.values()) / 1e9 if len(times) >= limits.steps else None


def _before(job: JobState, change: Change, opened_step: int) -> float | None:
    """Median step time from the opening of the incident to the change, over 3 steps at least."""
    start = change.step - MIN_BEFORE + 1
    if 0 <= opened_step <= change.step:
        start = min(start, max(opened_step, change.step - MAX_BEFORE + 1))
    times = _step_times(job, start, change.step + 1, range(change.epoch))
    return median(times.values()) / 1e9 if len(times) >= MIN_BEFORE else None


def _step_times(job: JobState, first: int, stop: int, epochs: range) -> dict[int, int]:
    """Step -> nanoseconds on its slowest rank, for steps in [first, stop) of these epochs."""
    slowest: dict[int, int] = {}
    for rank in job.ranks.values():
        for s in _range_of(rank.steps, first, epochs):
            if s.step < stop:
                slowest[s.step] = max(slowest.get(s.step, 0), s.duration_ns)
    return slowest


def _range_of(steps: deque[StepSample], first: int, epochs: range) -> list[StepSample]:
    """The newest samples of these epochs from step `first` on, without walking all that are kept.

    A job that went back to a checkpoint has made the same steps under several plans.
    """
    samples = []
    for sample in reversed(steps):
        if sample.epoch >= epochs.stop:
            continue
        if sample.epoch < epochs.start or sample.step < first:
            break
        samples.append(sample)
    return samples


def _notice(change: Change, promise: Proposal) -> Finding:
    before, after = change.step_time_before_s or 0.0, change.step_time_after_s or 0.0
    return Finding(
        check="slow_rank",
        subject=f"change {change.epoch}",
        severity=Severity.WARNING,
        summary=(
            f"The allocation change of epoch {change.epoch} brought nothing: a step took "
            f"{before:.3g} s before and takes {after:.3g} s after. It is being undone."
        ),
        signals={
            "step_time_before": f"{before:.4g} s",
            "step_time_after": f"{after:.4g} s",
            "promised": f"{promise.promised_step_s:.4g} s",
        },
        step=change.step,
    )
