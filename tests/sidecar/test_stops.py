"""A rank that stands still while others wait is killed, when that was asked for; no other ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from ntp_core.observe import Reason
from sidecar import stops
from sidecar.checks.dead_rank import DeadRank
from sidecar.stops import StopKiller
from sidecar.wire.process import process_start_ticks
from tests.support.jobs import DrivenJob, plan_of

EVEN = ((8, 8, 8), (12, 12))
VICTIM = 2


class Host:
    """Processes as a test says: pid -> nanoseconds it has run, None while it is not stopped."""

    def __init__(self) -> None:
        self.stopped: dict[int, int] = {}
        self.killed: list[tuple[int, int]] = []

    def look(self, pid: int) -> int | None:
        return self.stopped.get(pid)

    def kill(self, pid: int, start_ticks: int) -> bool:
        self.killed.append((pid, start_ticks))
        return True


def scene(after_s: float = 3.0) -> tuple[DrivenJob, Host, StopKiller]:
    """A job of which rank 2 stands still and the others wait."""
    job, host = DrivenJob(plan_of(EVEN)), Host()
    for rank in job.state.ranks.values():
        rank.pid_start_ticks = 77
    job.commit()
    job.enter([0, 1, 3, 4], seq=9)
    host.stopped[job.state.ranks[VICTIM].pid] = 5_000
    return job, host, StopKiller(after_s, host.look, host.kill)


def test_stopped_rank_is_killed_after_its_time_and_that_is_told() -> None:
    """Once; counted, noted for the trace, and part of the incident."""
    job, host, killer = scene()
    killer.tick(job.state, job.clock.now_ns)
    killer.tick(job.state, job.clock.advance(2.9))
    assert host.killed == []
    for _ in range(3):
        killer.tick(job.state, job.clock.advance(0.2))
    assert host.killed == [(5000 + VICTIM, 77)]
    assert job.state.killed_total == 1
    (kill,) = job.state.kills
    assert (kill.rank, round(kill.stopped_s, 1)) == (VICTIM, 3.1)
    job.kill(VICTIM)
    (finding,) = DeadRank().run(job.state, job.clock.now_ns)
    assert finding.signals["killed"] == "by the sidecar, as it had stood still for 3.1 s"


def test_nobody_is_killed_unless_asked_for() -> None:
    """Off by default."""
    job, host, killer = scene(after_s=0.0)
    for _ in range(5):
        killer.tick(job.state, job.clock.advance(10))
    assert host.killed == []


def test_rank_that_runs_in_between_is_slow_and_lives() -> None:
    """Stopped at every look, and yet it has run."""
    job, host, killer = scene()
    for number in range(100):
        host.stopped[5000 + VICTIM] = 5_000 + number
        killer.tick(job.state, job.clock.advance(0.1))
    assert host.killed == []


def test_rank_for_which_nobody_waits_lives() -> None:
    """Left behind by the job, or the job waits for nothing."""
    job, host, killer = scene()
    for rank in job.state.ranks.values():
        rank.collective = None
    for _ in range(5):
        killer.tick(job.state, job.clock.advance(3))
    job.enter([0, 1, 3, 4], seq=10)
    job.change(plan_of(((12, 12), (12, 12)), epoch=2, ranks=(0, 1, 3, 4)), Reason.RANK_DIED)
    for _ in range(5):
        killer.tick(job.state, job.clock.advance(3))
    assert host.killed == []


def test_rank_of_unknown_start_lives() -> None:
    """Its number may be another process' by now."""
    job, host, killer = scene()
    job.state.ranks[VICTIM].pid_start_ticks = 0
    for _ in range(5):
        killer.tick(job.state, job.clock.advance(3))
    assert host.killed == []


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A real process that stands still."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    yield process
    process.kill()
    process.communicate()


def test_real_process_is_seen_and_killed_only_as_itself(child: subprocess.Popen[bytes]) -> None:
    """Another start time is another process."""
    assert stops.look(child.pid) is not None
    assert stops.look(os.getpid()) is None
    ticks = process_start_ticks(child.pid)
    assert not stops.kill(child.pid, ticks + 1)
    assert child.poll() is None
    assert stops.kill(child.pid, ticks)
    assert child.wait(10) == -signal.SIGKILL
    assert not stops.kill(child.pid, ticks)
