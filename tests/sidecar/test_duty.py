"""The slow-down of the demo: steered by what the process got, and over when it should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sidecar.demo.duty import LOOK_EVERY_S, DutyCycle, cycle
from tests.support.servers import wait_until

SPIN = "while True: pass"


@pytest.fixture
def spinning() -> Iterator[subprocess.Popen[bytes]]:
    """A process that wants a processor all the time."""
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    yield process
    process.kill()
    process.wait()


def _status(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _worked_ns(pid: int) -> int:
    ran, queued, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
    return int(ran) + int(queued)


@pytest.mark.parametrize("factor", [2.0, 6.0])
def test_held_time_is_owed_time_whatever_the_host_does(
    spinning: subprocess.Popen[bytes], factor: float
) -> None:
    """Of the time that was slept away, all but the last debt is what the work was to cost."""
    held: list[float] = []
    now = 0.0

    def wait(seconds: float) -> bool:
        nonlocal now
        now += seconds
        if seconds != LOOK_EVERY_S:  # a hold
            held.append(seconds)
        else:  # one look is a millisecond of work, however long the host takes for it
            goal = _worked_ns(spinning.pid) + 1_000_000
            wait_until(lambda: _worked_ns(spinning.pid) >= goal, "work", 10, every_s=0.0005)
        return len(held) >= 20

    first = _worked_ns(spinning.pid)
    cycle(spinning.pid, factor, wait, lambda: now)
    owed_s = (factor - 1) * (_worked_ns(spinning.pid) - first) / 1e9
    assert sum(held) <= owed_s + 1e-9
    assert sum(held) >= 0.5 * owed_s  # the rest: work between a look and its stop, capped holds
    assert _status(spinning.pid) not in "Tt"


def test_process_that_waits_is_not_held() -> None:
    """A sleeper owes nothing: a wait for others costs no more than without the slow-down."""
    sleeper = subprocess.Popen(
        [sys.executable, "-c", "print(flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert sleeper.stdout is not None
    sleeper.stdout.readline()
    wait_until(lambda: _status(sleeper.pid) == "S", "sleep", 10)
    asked: list[float] = []

    def wait(seconds: float) -> bool:
        asked.append(seconds)
        return len(asked) >= 50

    cycle(sleeper.pid, 100.0, wait)
    assert set(asked) == {LOOK_EVERY_S}
    sleeper.communicate(b"\n", timeout=10)


def test_slowed_process_runs_on_when_its_slower_is_killed_gently_or_leaves(
    spinning: subprocess.Popen[bytes],
) -> None:
    """Left by the block, or by SIGTERM: continued either way."""
    with DutyCycle(spinning.pid, 50.0):
        wait_until(lambda: _status(spinning.pid) == "T", "a hold", 10)
    wait_until(lambda: _status(spinning.pid) != "T", "running on", 10)
    slower = subprocess.Popen(
        [sys.executable, "-m", "sidecar.demo.duty", str(spinning.pid), "50"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert slower.stdout is not None
    slower.stdout.readline()
    wait_until(lambda: _status(spinning.pid) == "T", "a hold", 10)
    os.kill(slower.pid, signal.SIGTERM)
    slower.communicate(timeout=10)
    wait_until(lambda: _status(spinning.pid) != "T", "running on", 10)


def test_slower_ends_with_its_process() -> None:
    """A process that is gone is not waited for."""
    process = subprocess.Popen([sys.executable, "-c", SPIN])
    slow_down = DutyCycle(process.pid, 3.0)
    process.kill()
    process.wait()
    assert slow_down._process.wait(10) == 0
    slow_down.stop()
