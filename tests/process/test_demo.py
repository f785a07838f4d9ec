"""The demo as a user runs it: real ranks, a real slow-down, a real flipped bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sidecar.demo.command import main
from sidecar.demo.scenario import Scenario
from sidecar.demo.verdict import missing
from sidecar.wire.rundir import default_base, user_dir
from tests.support.servers import wait_until

DEMO = [sys.executable, "-m", "sidecar", "demo", "--quick", "--port", "0"]
BY_THE_CLOCK = {"the slow rank was named within 5 steps", "a step became faster"}
"""What a busy neighbour on this machine can spoil; all else must hold anywhere."""


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Any]:
    """One demo, its output and its report."""
    file = tmp_path_factory.mktemp("demo") / "report.json"
    done = subprocess.run([*DEMO, "--json", str(file)], capture_output=True, text=True, timeout=400)
    assert file.exists(), done.stdout + done.stderr
    return done, json.loads(file.read_text())


@pytest.mark.timeout(420)
def test_demo_report_says_that_all_of_it_happened(
    played: tuple[subprocess.CompletedProcess[str], Any],
) -> None:
    """Named, repaired, moved, delivered and equal to one process: read from the report alone."""
    done, report = played
    lacking = set(missing(report, Scenario()))
    assert lacking <= BY_THE_CLOCK, done.stdout
    assert done.returncode == (1 if lacking else 0)


def test_demo_report_has_the_documented_form(
    played: tuple[subprocess.CompletedProcess[str], Any],
) -> None:
    """Every key of the documented report is there, with a measured value."""
    _, report = played
    assert set(report) == {
        "ranks",
        "replicas",
        "steps",
        "loss",
        "parity",
        "replicas_bit_identical_steps",
        "changes",
        "incidents",
        "webhooks",
        "probe",
        "sidecar",
    }
    assert report["probe"]["events"] > 1000
    assert 0 < report["sidecar"]["cpu_ratio"] < 1
    # Only the step in which the bit was flipped may differ between replicas.
    assert report["replicas_bit_identical_steps"] >= report["steps"] - 2


def test_demo_leaves_nothing_behind(
    played: tuple[subprocess.CompletedProcess[str], Any],
) -> None:
    """No process and no run directory of a demo is left."""
    assert not _leftovers()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_demo_interrupted_leaves_nothing_behind(number: signal.Signals) -> None:
    """However it is ended, in the middle of starting its ranks, its processes end too."""
    demo = subprocess.Popen(DEMO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert demo.stdout is not None
    for line in demo.stdout:
        if "page" in line:
            break
    wait_until(lambda: len(_job_processes()) > Scenario().num_ranks, "the ranks of the demo", 30)
    demo.send_signal(number)
    demo.communicate(timeout=30)
    assert demo.returncode in (130, -9)
    wait_until(lambda: not _job_processes(), "the end of all processes of the demo", 30)
    if number is not signal.SIGKILL:  # files of a killed demo are removed by the next start
        assert not _leftovers()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["--json", "/nowhere/report.json"], "/nowhere/report.json"), (["--port", "99999"], "99999")],
)
def test_demo_refuses_bad_input_in_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A report that cannot be written, a port that cannot be: one line that names the value."""
    assert main(["--quick", *arguments]) == 2
    shown = capsys.readouterr()
    assert said in shown.err + shown.out
    assert len((shown.err + shown.out).strip().splitlines()) <= 4


def _job_processes() -> list[str]:
    """Command lines of living ranks, launchers and slow-downs."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except OSError:
            continue
        is_ours = "ntp_core.runtime." in line or "sidecar.demo.duty" in line
        if is_ours and not is_zombie and str(os.getpid()) != entry.name:
            found.append(line)
    return found


def _leftovers() -> list[str]:
    folder = user_dir(default_base())
    dirs = [p.name for p in folder.glob("demo-*")] if folder.is_dir() else []
    return [*dirs, *_job_processes()]
