"""Finds ranks whose process is gone: without a goodbye, or with an exit status other than 0.

A goodbye with a status that could not be known (`STATUS_UNKNOWN`) is no evidence of a failure.

A dead rank stops being a fault when the plan in force no longer counts on it, or when it is back.
One that was no member any more (left behind, standing by, asking to be let in) is no loss when it
dies.
Ranks are judged by what the node says about their process, never by silence alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ntp_core.observe import Op
from sidecar.checks.finding import Finding, Severity
from sidecar.ingest.collectives import GENERATION_SHIFT, generation_of
from sidecar.ingest.state import JobState, OpenCollective, RankState

STATUS_UNKNOWN = -1  # as the probe writes it, docs/wire_format.md
HOLD_NS = 1_000_000_000
"""A death that this check saw happen is reported this long even if the job has already gone on
without the rank: a recovery within one tick must not hide it."""


@dataclass(slots=True)
class DeadRank:
    """The check. It remembers which members it has seen alive, whom it has reported while the job
    counted on them, and when it first saw each dead."""

    name: str = "dead_rank"
    _seen_alive: dict[int, int] = field(default_factory=dict)  # rank -> pid
    _reported: dict[int, int] = field(default_factory=dict)  # rank -> pid
    _dead_since_ns: dict[int, int] = field(default_factory=dict)

    def applies(self, job: JobState) -> bool:
        """Every job has ranks and steps."""
        del job
        return True

    def ready(self, job: JobState) -> bool:
        """True when the liveness of at least one rank is known."""
        return any(r.alive is not None for r in job.ranks.values())

    def run(self, job: JobState, now_ns: int) -> list[Finding]:
        """One finding for each dead rank that the job still counts on or has just lost."""
        dead = [r for r in job.ranks.values() if is_dead(r)]
        self._note_living(job)
        gone = {r.rank for r in dead}
        self._dead_since_ns = {k: t for k, t in self._dead_since_ns.items() if k in gone}
        if not dead:
            return []
        return [_finding(job, r, now_ns) for r in dead if self._matters(job, r, now_ns)]

    def _note_living(self, job: JobState) -> None:
        for r in job.ranks.values():
            if r.alive and job.counts_on(r.rank):
                self._seen_alive[r.rank] = r.pid
            elif r.alive:
                self._seen_alive.pop(r.rank, None)

    def _matters(self, job: JobState, rank: RankState, now_ns: int) -> bool:
        since = self._dead_since_ns.setdefault(rank.rank, now_ns)
        if job.counts_on(rank.rank):
            self._reported[rank.rank] = rank.pid
            return True
        # However long the job took to go on, that it has is said once more.
        if self._reported.pop(rank.rank, None) == rank.pid:
            return True
        was_seen = self._seen_alive.get(rank.rank) == rank.pid
        return was_seen and now_ns - since < HOLD_NS


def is_dead(rank: RankState) -> bool:
    """Gone without an announced exit, or announced one with a status that says failure."""
    return rank.alive is False and rank.exited not in (0, STATUS_UNKNOWN)


def _finding(job: JobState, rank: RankState, now_ns: int) -> Finding:
    how = "left no goodbye" if rank.exited is None else f"left with exit status {rank.exited}"
    place = "no replica" if rank.replica is None else f"replica {rank.replica}"
    goes_on = ""
    if job.plan is not None and not job.counts_on(rank.rank):
        goes_on = f"the job goes on without it under epoch {job.plan.epoch}"
    return Finding(
        check="dead_rank",
        subject=f"rank {rank.rank}",
        severity=Severity.CRITICAL,
        summary=(
            f"Rank {rank.rank} of {place} is dead after step {rank.step}: its process {how}"
            f"{goes_on and f'; {goes_on}'}."
        ),
        signals={
            "process": f"pid {rank.pid} is gone; it {how}",
            "last_step": f"{rank.step} committed, {_open_step(rank)}",
            "last_collective": _collective(job, rank),
            "last_record": f"{max(0, now_ns - rank.last_progress_ns) / 1e9:.2f} s ago",
            "others": _others(job, rank),
            **_killed(rank),
            **({"job": goes_on} if goes_on else {}),
        },
        rank=rank.rank,
        replica=rank.replica,
        step=rank.step,
    )


def _killed(rank: RankState) -> dict[str, str]:
    if rank.killed_after_s is None:
        return {}
    return {"killed": f"by the sidecar, as it had stood still for {rank.killed_after_s:.1f} s"}


def _open_step(rank: RankState) -> str:
    return "none in progress" if rank.step_open is None else f"{rank.step_open} in progress"


def _collective(job: JobState, rank: RankState) -> str:
    c = rank.collective
    if c is None:
        return f"inside none; newest sequence number {rank.collective_seq}"
    return f"inside {describe(job, c)}"


def describe(job: JobState, c: OpenCollective) -> str:
    """Which collective: operation, number, group, and generation of the group where it has one."""
    generation = 0 if job.plan is None else generation_of(c.group)
    if not generation:
        return f"{op_name(c.op)} number {c.seq} of group {c.group}"
    number = c.group - (generation << GENERATION_SHIFT)
    return f"{op_name(c.op)} number {c.seq} of group {number}, generation {generation}"


def _others(job: JobState, rank: RankState) -> str:
    living = [r for r in job.ranks.values() if r.alive and r.rank != rank.rank]
    waiting = sum(1 for r in living if r.collective is not None)
    return f"{len(living)} ranks live, {waiting} of them inside a collective"


def op_name(op: int) -> str:
    """Lower-case name of a collective operation; numbers of newer writers stay numbers."""
    return Op(op).name.lower() if op in Op._value2member_map_ else f"operation {op}"
