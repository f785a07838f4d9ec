"""Kills a rank whose process stands still while others wait for it. Off unless it is asked for.

A stopped process (state T: job control, a debugger that left, a frozen cgroup's neighbour) holds
its peers up for as long as their patience lasts. Its death they notice at once.

Only the very process that wrote a ring of the watched job, as a member of the plan in force, of the
same user: pid and start time are compared through a descriptor of the process, so that no other
that got its number can be hit. One that merely runs slowly, stopped and continued many times a
second, has run in between and is let live.
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sidecar.ingest.state import JobState, Kill, RankState
from sidecar.wire.process import PROC, process_start_ticks

log = logging.getLogger(__name__)

_Process = tuple[int, int]  # pid, start ticks


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A process that stands still, since when, and what it had run by then."""

    since_ns: int
    ran_ns: int


def look(pid: int, proc: Path = PROC) -> int | None:
    """Nanoseconds on a processor of a process that is stopped (state T); None for any other."""
    try:
        state = (proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        ran = (proc / str(pid) / "schedstat").read_text().split()[0]
        return int(ran) if state == "T" else None
    except (OSError, ValueError, IndexError):
        return None


def kill(pid: int, start_ticks: int, proc: Path = PROC) -> bool:
    """SIGKILL that very process if it is ours; whether it was done."""
    try:
        descriptor = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return False
    try:
        is_ours = (proc / str(pid)).stat().st_uid == os.getuid()
        if not is_ours or process_start_ticks(pid, proc) != start_ticks:
            return False
        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


@dataclass(slots=True)
class StopKiller:
    """Watches members that stand still.

    Args:
        after_s: how long one must have stood still; 0 kills nobody.
        look, kill: as the functions of this module.
    """

    after_s: float = 0.0
    look: Callable[[int], int | None] = look
    kill: Callable[[int, int], bool] = kill
    _standing: dict[_Process, Standing] = field(default_factory=dict)

    def tick(self, job: JobState, now_ns: int) -> None:
        """Kill whom it is time to kill; it is noted in the state of job and rank."""
        if self.after_s <= 0:
            return
        seen: dict[_Process, Standing] = {}
        for rank in job.members:
            if not _can_be_killed(rank) or (ran_ns := self.look(rank.pid)) is None:
                continue
            process = rank.pid, rank.pid_start_ticks
            known = self._standing.get(process)
            if known is None or known.ran_ns != ran_ns:
                known = Standing(since_ns=now_ns, ran_ns=ran_ns)
            seen[process] = known
            if now_ns - known.since_ns >= self.after_s * 1e9 and _is_awaited(job, rank):
                self._strike(job, rank, now_ns, (now_ns - known.since_ns) / 1e9)
        self._standing = seen

    def _strike(self, job: JobState, rank: RankState, now_ns: int, stopped_s: float) -> None:
        if not self.kill(rank.pid, rank.pid_start_ticks):
            return
        rank.killed_after_s = stopped_s
        job.killed_total += 1
        job.kills.append(Kill(rank=rank.rank, t_ns=now_ns, stopped_s=stopped_s))
        log.warning(
            "rank %s (pid %s) stood still for %.1f s while others waited: killed",
            rank.rank,
            rank.pid,
            stopped_s,
        )


def _can_be_killed(rank: RankState) -> bool:
    lives = rank.alive is True and rank.exited is None and rank.killed_after_s is None
    return lives and rank.pid > 1 and rank.pid_start_ticks > 0


def _is_awaited(job: JobState, rank: RankState) -> bool:
    """Whether a living member waits in a collective since the rank's last word, or before."""
    return any(
        r.collective is not None and r.alive is not False
        for r in job.members
        if r.rank != rank.rank
    )
