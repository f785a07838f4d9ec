"""Time in the run queue, by the kernel's own count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ntp_core.runtime.processor import ProcessorWait, queued_ns

CROWD = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
end = time.monotonic() + float(sys.argv[2])
while time.monotonic() < end:
    pass
"""


def test_processor_wait_grows_beside_a_busy_neighbour_on_the_same_core() -> None:
    """Two spinning processes on one core: each waits about as long as it runs."""
    core = min(os.sched_getaffinity(0))
    neighbour = subprocess.Popen([sys.executable, "-c", CROWD, str(core), "20"])
    probe = subprocess.run(
        [sys.executable, "-c", PROBE, str(core)], capture_output=True, text=True, check=True
    )
    neighbour.kill()
    neighbour.wait()
    ran, waited = (int(word) for word in probe.stdout.split())
    assert waited > ran / 4, f"ran {ran} ns, waited {waited} ns"


PROBE = """
import os, sys, time
from ntp_core.runtime.processor import ProcessorWait
os.sched_setaffinity(0, {int(sys.argv[1])})
counter = ProcessorWait()
before = counter.read()
while counter.read()[0] - before[0] < 300_000_000:
    pass
after = counter.read()
print(after[0] - before[0], after[1] - before[1])
"""


def test_processor_wait_without_counters_is_zero(tmp_path: Path) -> None:
    """Where the system does not tell, nothing is taken off."""
    counter = ProcessorWait(str(tmp_path / "nothing"))
    assert counter.read() == (0, 0)
    counter.close()


@pytest.mark.parametrize(
    ("busy", "ran", "waited", "expected"),
    [
        (100, 100, 0, 0),
        (100, 40, 60, 60),  # crowded: all that it did not run it waited
        (100, 20, 0, 0),  # stopped: neither ran nor waited
        (100, 20, 30, 30),  # stopped and crowded
        (100, 80, 50, 20),  # part of the wait came after a collective
        (0, 5, 9, 0),
    ],
)
def test_queued_never_takes_more_than_what_did_not_run(
    busy: int, ran: int, waited: int, expected: int
) -> None:
    """What is taken off leaves at least the time on a processor."""
    assert expected == queued_ns(busy, (7, 7), (7 + ran, 7 + waited))
