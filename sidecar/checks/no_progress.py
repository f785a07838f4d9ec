"""Finds a job whose ranks live but commit no step, and names who keeps the others waiting.

Progress is the only clock: heartbeats, records and utilisation can all look well while nothing
moves. The limit is learnt from the job's own step times, between a floor and a ceiling; the first
step, an allocation change and a checkpoint have longer ones, and each of them ages out, so that a
lost end record never turns the check off.

Only ranks that the plan in force counts on are looked at. One that was left behind, stands by or
asks to be let in makes no steps and keeps nobody waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from sidecar.checks.dead_rank import describe, is_dead
from sidecar.checks.finding import Finding, Severity
from sidecar.ingest.collectives import generation_of
from sidecar.ingest.state import JobState, OpenCollective, RankState

MEDIAN_STEPS = 64
"""Newest steps that the learnt limit is taken from."""
STOPPED_FOR_NS = 1_000_000_000
"""A process counts as stopped when every look for this long has found it so: one that is stopped
and continued many times a second is slow, not stopped."""
RANKS_NAMED = 8
"""Most ranks listed in a signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressLimits:
    """How long a job may go without a committed step.

    Attributes:
        floor_s, ceiling_s: bounds of the learnt limit, in seconds.
        factor: learnt limit in median step times.
        first_step_s: limit before any step is committed (compiling, loading), in seconds.
        change_s: limit inside an allocation change, in seconds.
        save_s: limit while a checkpoint is written, in seconds.
        stopped_floor_s, stopped_factor: the same bounds for a process that the system reports as
            stopped: it cannot move by itself, so there is less to wait for.
    """

    floor_s: float = 5.0
    ceiling_s: float = 300.0
    factor: float = 10.0
    first_step_s: float = 120.0
    change_s: float = 60.0
    save_s: float = 600.0
    stopped_floor_s: float = 2.0
    stopped_factor: float = 2.0


def process_state(pid: int) -> str | None:
    """The state letter of /proc/PID/stat (R, S, D, T, t, Z); None when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold spaces and parentheses itself; the state follows the last.
    rest = text.rpartition(")")[2].split()
    return rest[0] if rest else None


@dataclass(slots=True)
class NoProgress:
    """The check. It remembers the learnt step time, and since when processes are stopped."""

    limits: ProgressLimits = field(default_factory=ProgressLimits)
    state_of: Callable[[int], str | None] = process_state
    name: str = "no_progress"
    _step_s: float = 0.0
    _step_s_of: int = -1  # end_ns of the step that `_step_s` was learnt at
    _stopped_since: dict[int, int] = field(default_factory=dict)  # pid -> now_ns

    def applies(self, job: JobState) -> bool:
        """Every job has ranks and steps."""
        del job
        return True

    def ready(self, job: JobState) -> bool:
        """True while a rank lives that has started a step or committed one."""
        return any(
            r.alive and r.exited is None and (r.steps_total > 0 or r.step_open is not None)
            for r in job.members
        )

    def run(self, job: JobState, now_ns: int) -> list[Finding]:
        """At most one finding, about the job; its `rank` is the culprit where one is named."""
        living = [r for r in job.members if r.alive is not False and r.exited is None]
        if not living or not self.ready(job):
            return []
        last_ns = _last_progress_ns(living, job)
        age_s = (now_ns - last_ns) / 1e9
        if age_s < self.limits.stopped_floor_s / 2:
            self._stopped_since.clear()
            return []
        step_s = self._median_step_s(living)
        limit_s = self._limit_s(job, living, step_s)
        stopped = self._stopped(living, now_ns)
        if age_s < max(self.limits.stopped_floor_s, self.limits.stopped_factor * step_s):
            stopped = []
        if age_s < limit_s and not stopped:
            return []
        return [_finding(job, living, stopped, age_s, limit_s, now_ns)]

    def _median_step_s(self, living: list[RankState]) -> float:
        newest = max((r.steps[-1].end_ns for r in living if r.steps), default=-1)
        if newest != self._step_s_of:
            self._step_s_of = newest
            rank = max(living, key=lambda r: len(r.steps))
            recent = [s.duration_ns / 1e9 for s in list(rank.steps)[-MEDIAN_STEPS:]]
            self._step_s = median(recent) if recent else 0.0
        return self._step_s

    def _limit_s(self, job: JobState, living: list[RankState], step_s: float) -> float:
        if not any(r.steps_total for r in living):
            return self.limits.first_step_s
        learnt = max(self.limits.floor_s, self.limits.factor * step_s)
        limit = min(learnt, self.limits.ceiling_s)
        if _open_change(job):
            return max(limit, self.limits.change_s)
        return max(limit, self.limits.save_s) if _is_saving(job, living) else limit

    def _stopped(self, living: list[RankState], now_ns: int) -> list[RankState]:
        """Ranks whose process is stopped (job control or a signal), not traced by a debugger."""
        found = [r for r in living if self.state_of(r.pid) == "T"]
        self._stopped_since = {r.pid: self._stopped_since.get(r.pid, now_ns) for r in found}
        return [r for r in found if now_ns - self._stopped_since[r.pid] >= STOPPED_FOR_NS]


def _open_change(job: JobState) -> bool:
    return bool(job.changes) and job.changes[-1].end_ns is None


def _is_saving(job: JobState, living: list[RankState]) -> bool:
    """Whether a checkpoint is written: a rank says so, or all ranks of a plan stand between two
    steps. The engine saves there, with all ranks together; one rank alone that has not begun what
    the others have is late."""
    if any(r.is_saving for r in living):
        return True
    return job.plan is not None and all(r.step_open is None and r.steps_total for r in living)


def _last_progress_ns(living: list[RankState], job: JobState) -> int:
    """When the job last moved: a committed step, the end of a checkpoint, or a border of an
    allocation change."""
    last = max(max(r.saved_ns, r.steps[-1].end_ns if r.steps else r.start_ns) for r in living)
    if not job.changes:
        return last
    change = job.changes[-1]
    phases = max((s.end_ns for s in change.spans), default=0)
    return max(last, change.begin_ns, phases, change.end_ns or 0)


def _finding(
    job: JobState,
    living: list[RankState],
    stopped: list[RankState],
    age_s: float,
    limit_s: float,
    now_ns: int,
) -> Finding:
    waiting = [r for r in living if r.collective is not None]
    culprits = stopped or _behind(job, living, waiting)
    rank = culprits[0] if len(culprits) == 1 else None
    signals = {
        "no_step_for": f"{age_s:.1f} s; the limit is {limit_s:.1f} s",
        "waiting": f"{len(waiting)} of {len(living)} living ranks inside a collective",
    }
    if awaited := _awaited(waiting, culprits):
        signals["collective"] = _sized(job, awaited)
    if stopped:
        signals["process_state"] = f"{_ranks(stopped)}: stopped (state T)"
        if killed := [r for r in stopped if r.killed_after_s is not None]:
            signals["killed"] = f"{_ranks(killed)}: by the sidecar (kill_stopped)"
    if culprits:
        signals["not_arrived"] = _ranks(culprits)
        age = (now_ns - max(r.last_progress_ns for r in culprits)) / 1e9
        signals["newest_record"] = f"{age:.1f} s ago from {_ranks(culprits)}"
    return Finding(
        check="no_progress",
        # One subject for all: who is to blame may become clear only while it lasts.
        subject="job",
        severity=Severity.CRITICAL,
        summary=_summary(job, culprits, stopped, awaited, age_s),
        signals=signals,
        rank=rank.rank if rank else None,
        replica=rank.replica if rank else None,
        step=max(r.step for r in living),
    )


def _summary(
    job: JobState,
    culprits: list[RankState],
    stopped: list[RankState],
    awaited: OpenCollective | None,
    age_s: float,
) -> str:
    head = f"No rank has committed a step for {age_s:.1f} s"
    if not culprits:
        return f"{head}; nothing tells which rank holds the others up."
    who = _ranks(culprits)
    if stopped:
        plural = "are" if len(stopped) > 1 else "is"
        why = f"the process of {who} {plural} stopped"
    elif all(is_dead(r) for r in culprits):
        why = f"{who} died and the others still wait"
    else:
        why = f"{who} has not arrived" if len(culprits) == 1 else f"{who} have not arrived"
    return f"{head}: {why}" + (f" at {_sized(job, awaited)}." if awaited else ".")


def _behind(job: JobState, living: list[RankState], waiting: list[RankState]) -> list[RankState]:
    """Who keeps the waiting ranks waiting; empty when nothing tells.

    First the living ranks that are in no collective while others are. When all are in one, those
    that are still in groups of an older generation. Then those with a lower sequence number than
    their group's newest: they skipped a call. Numbers of different groups, and so of different
    generations, are never compared.
    """
    if not waiting:
        return []
    outside = [r for r in living if r.collective is None]
    if outside:
        return outside
    if behind := _of_older_generation(job, waiting):
        return behind
    newest: dict[int, int] = {}
    for r in waiting:
        if r.collective is not None:
            group = r.collective.group
            newest[group] = max(newest.get(group, 0), r.collective.seq)
    late = [r for r in waiting if r.collective and r.collective.seq < newest[r.collective.group]]
    return late or [r for r in job.members if is_dead(r)]


def _of_older_generation(job: JobState, waiting: list[RankState]) -> list[RankState]:
    """Ranks whose peers have formed new groups without them so far. Only the engine has them."""
    if job.plan is None:
        return []
    generations = {r.rank: generation_of(r.collective.group) for r in waiting if r.collective}
    newest = max(generations.values())
    return [r for r in waiting if generations.get(r.rank, newest) < newest]


def _awaited(waiting: list[RankState], culprits: list[RankState]) -> OpenCollective | None:
    """The collective that the culprits are missing from: the one entered first, newest of its
    group. Ranks behind it entered others later."""
    names = {r.rank for r in culprits}
    entered = [r.collective for r in waiting if r.collective and r.rank not in names]
    return min(entered, key=lambda c: c.begin_ns, default=None)


def _sized(job: JobState, c: OpenCollective) -> str:
    return f"{describe(job, c)} ({c.num_bytes} bytes)"


def _ranks(ranks: Iterable[RankState]) -> str:
    numbers = sorted(r.rank for r in ranks)
    text = ", ".join(str(n) for n in numbers[:RANKS_NAMED])
    more = f" and {len(numbers) - RANKS_NAMED} more" if len(numbers) > RANKS_NAMED else ""
    return f"rank {text}" if len(numbers) == 1 else f"ranks {text}{more}"
