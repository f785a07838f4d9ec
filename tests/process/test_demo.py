"""The demo as a user runs it: real ranks, a real slow-down, a real flipped bit."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.demo.command import main
from sidecar.demo.scenario import Scenario
from sidecar.demo.verdict import missing
from sidecar.wire.rundir import known_bases, user_dir
from tests.support.servers import wait_until

DEMO = [sys.executable, "-m", "sidecar", "demo", "--quick", "--port", "0"]
BY_THE_CLOCK = {"the slow rank was named within 5 steps", "a step became faster"}
"""What a busy neighbour on this machine can spoil; all else must hold anywhere."""
JOB_WORDS = ("ntp_core.runtime.", "sidecar.demo.duty")
ANY = ("",)


MARK = "TEST_DEMO_MARK"
"""In the environment of a demo and so of all that it starts: other demos of this user have none, or
another."""


@dataclass(slots=True)
class Demo:
    """One demo under test: its own processes and its own run directory, and no others."""

    mark: str = field(default_factory=lambda: secrets.token_hex(8))
    said: str = ""

    @property
    def env(self) -> dict[str, str]:
        """The environment to start it in."""
        return {**os.environ, MARK: self.mark}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start it and read until it has told its job id and page."""
        demo = subprocess.Popen(
            [*DEMO, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.env,
        )
        self.read_until(demo, "logs in")
        return demo

    def read_until(self, demo: subprocess.Popen[str], text: str) -> None:
        """Read its output up to the line that holds a text, or to its end."""
        assert demo.stdout is not None
        for line in demo.stdout:
            self.said += line
            if text in line:
                break

    @property
    def job_id(self) -> str:
        """As it told."""
        found = re.search(r"job (demo-[0-9a-f]{6}),", self.said)
        assert found, self.said
        return found[1]

    def processes(self, words: tuple[str, ...] = JOB_WORDS) -> dict[int, str]:
        """Pid and command line of its living ranks, launchers and slow-downs."""
        wanted, found = f"{MARK}={self.mark}".encode(), {}
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if wanted not in (entry / "environ").read_bytes().split(b"\0"):
                    continue
                line = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                )
                is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:
                continue
            if not is_zombie and any(w in line for w in words):
                found[int(entry.name)] = line
        return found

    def leftovers(self) -> list[str]:
        """What is left of it."""
        places = [user_dir(base) / self.job_id for base in known_bases()]
        return [*(str(p) for p in places if p.exists()), *self.processes(ANY).values()]


@pytest.fixture(scope="module")
def played(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Demo, int, Any]:
    """One demo, its exit code and its report."""
    file = tmp_path_factory.mktemp("demo") / "report.json"
    demo = Demo()
    done = subprocess.run(
        [*DEMO, "--json", str(file)], capture_output=True, text=True, timeout=400, env=demo.env
    )
    demo.said = done.stdout
    assert file.exists(), done.stdout + done.stderr
    return demo, done.returncode, json.loads(file.read_text())


@pytest.mark.timeout(420)
def test_demo_report_says_that_all_of_it_happened(played: tuple[Demo, int, Any]) -> None:
    """Named, repaired, moved, delivered and equal to one process: read from the report alone."""
    demo, code, report = played
    lacking = set(missing(report, Scenario()))
    assert lacking <= BY_THE_CLOCK, demo.said
    assert code == (1 if lacking else 0)


def test_demo_report_has_the_documented_form(played: tuple[Demo, int, Any]) -> None:
    """Every key of the documented report is there, with a measured value."""
    _, _, report = played
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


def test_demo_leaves_nothing_behind(played: tuple[Demo, int, Any]) -> None:
    """No process and no run directory of the demo is left."""
    assert not played[0].leftovers()


@pytest.mark.timeout(90)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_demo_interrupted_leaves_nothing_behind(number: signal.Signals) -> None:
    """However it is ended, in the middle of starting its ranks, its processes end too."""
    own = Demo()
    demo = own.start()
    wait_until(lambda: len(own.processes()) > Scenario().num_ranks, "the ranks of the demo", 30)
    demo.send_signal(number)
    demo.communicate(timeout=30)
    assert demo.returncode in (130, -9)
    wait_until(lambda: not own.processes(), "the end of all processes of the demo", 30)
    if number is not signal.SIGKILL:  # files of a killed demo are removed by the next start
        assert not own.leftovers()


@pytest.mark.timeout(120)
def test_demo_broken_keeps_its_page_when_asked_and_tells_the_logs() -> None:
    """A rank is killed: the logs are told, page and log files stay until Ctrl-C, then all goes."""
    own = Demo()
    demo = own.start("--keep")
    url = re.search(r"page +(http://\S+)", own.said)
    assert url, own.said
    page = httpx.Client(base_url=url[1], trust_env=False)
    wait_until(lambda: bool(page.get("/api/v1/job").json()["step"]), "a step of the demo", 60)
    os.kill(page.get("/api/v1/ranks").json()["ranks"][0]["pid"], signal.SIGKILL)
    own.read_until(demo, "Ctrl-C ends")
    assert "broken" in own.said
    assert "the job ended with" in own.said
    assert "job.log: " in own.said
    assert page.get("/healthz").status_code == 200
    page.close()
    demo.send_signal(signal.SIGINT)
    demo.communicate(timeout=30)
    assert demo.returncode == 1
    assert not own.leftovers()


def test_demo_of_somebody_else_is_not_ours() -> None:
    """A second run of these tests on the same machine must not be taken for what is left of one."""
    other = Demo()
    slowed = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    duty = subprocess.Popen(
        [sys.executable, "-m", "sidecar.demo.duty", str(slowed.pid), "1.0"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=other.env,
    )
    assert duty.stdout is not None
    duty.stdout.readline()
    assert list(other.processes()) == [duty.pid]
    assert not Demo().processes()
    duty.communicate(timeout=10)
    slowed.communicate(timeout=10)


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
