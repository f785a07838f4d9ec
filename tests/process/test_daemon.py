"""The real daemon over real rings of real processes that are stopped and killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sidecar.checks.finding import Finding
from sidecar.config import load
from sidecar.daemon import Daemon, read_address
from sidecar.ingest.state import JobState
from sidecar.notify.receiver import WebhookReceiver
from sidecar.notify.signer import load_secret
from tests.support.servers import start_alertmanager

WORLD = 3
TIMEOUT_S = 30.0
POLL_S = 0.05

Data = dict[str, Any]


def wait_for(what: str, look: Callable[[], Any]) -> Any:
    """The first true result of `look`; fails the test when none comes in time."""
    end_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < end_s:
        if found := look():
            return found
        time.sleep(POLL_S)
    pytest.fail(f"{what}: not within {TIMEOUT_S} s")


class Scene:
    """Three ranks and a daemon over one run directory."""

    def __init__(self, run_dir: Path, *flags: str) -> None:
        self.run_dir = run_dir
        self.flags = flags
        run_dir.mkdir(mode=0o700)
        self.ranks = [self._spawn_rank(r) for r in range(WORLD)]
        self.daemon = self.spawn_daemon()

    def _spawn_rank(self, rank: int) -> subprocess.Popen[bytes]:
        cmd = [sys.executable, "-m", "tests.support.fake_rank", str(self.run_dir), str(rank)]
        return subprocess.Popen([*cmd, str(WORLD)], stdin=subprocess.PIPE)

    def spawn_daemon(self) -> subprocess.Popen[bytes]:
        """A fresh daemon; returns when it serves."""
        cmd = [sys.executable, "-W", "error", "-m", "sidecar", "daemon", "--port", "0"]
        cmd += ["--run-dir", str(self.run_dir), "--job-id", "fake", "--clear-s", "0.2"]
        cmd += self.flags
        daemon = subprocess.Popen(cmd, stdout=subprocess.DEVNULL)
        wait_for("daemon up", lambda: (read_address(self.run_dir) or (0, ""))[0] == daemon.pid)
        return daemon

    def get(self, path: str) -> httpx.Response:
        """One answer of the daemon."""
        address = read_address(self.run_dir)
        assert address is not None
        return httpx.get(address[1] + path, trust_env=False, timeout=10)

    def step(self) -> int:
        """The job's step as the daemon sees it."""
        return self.get("/api/v1/job").json()["step"] or 0

    def incidents(self, check: str, state: str) -> list[Data]:
        """Incidents of a check in a state."""
        found = self.get("/api/v1/incidents").json()["incidents"]
        return [i for i in found if (i["check"], i["state"]) == (check, state)]

    def firing(self, check: str) -> Callable[[], list[Data]]:
        """For `wait_for`."""
        return lambda: self.incidents(check, "firing")

    def close(self) -> None:
        """End what still runs."""
        for process in [*self.ranks, self.daemon]:
            if process.stdin is not None:
                process.stdin.close()
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
            process.wait()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    """A job under watch that has done its first steps."""
    made = Scene(tmp_path / "run")
    try:
        wait_for("ten steps", lambda: made.step() >= 10)
        yield made
    finally:
        made.close()


def test_daemon_healthy_job_answers_everywhere_and_finds_nothing(scene: Scene) -> None:
    """Metrics, health, readiness, API: all there; uneven shares 1:2:3 are no incident."""
    assert scene.get("/healthz").json() == {"status": "ok", "reason": "ticking"}
    assert scene.get("/readyz").status_code == 200
    metrics = scene.get("/metrics").text
    for line in (
        'nutp_job_ranks{nutp_job="fake",state="alive"} 3.0',
        'nutp_rank_up{nutp_job="fake",rank="2"} 1.0',
        "nutp_sidecar_tick_errors_total 0.0",
    ):
        assert line in metrics
    wait_for("sixty steps", lambda: scene.step() >= 60)
    assert scene.get("/api/v1/incidents").json() == {"incidents": []}
    checks = {c["name"]: c for c in scene.get("/api/v1/checks").json()["checks"]}
    assert checks["slow_rank"]["ready"] and checks["dead_rank"]["runs"] > 0
    report = scene.get("/api/v1/report").json()
    assert report["ranks"] == WORLD
    assert report["loss"]["first"] == pytest.approx(5.0 * 0.999)
    assert report["probe"]["events_lost"] == 0


def test_daemon_stopped_rank_is_named_and_resolved_when_it_goes_on(scene: Scene) -> None:
    """SIGSTOP: no_progress names the rank and the state; SIGCONT: resolved."""
    os.kill(scene.ranks[1].pid, signal.SIGSTOP)
    (incident,) = wait_for("stuck", scene.firing("no_progress"))
    assert incident["rank"] == 1
    assert incident["severity"] == "critical"
    assert "stopped" in incident["signals"]["process_state"]
    os.kill(scene.ranks[1].pid, signal.SIGCONT)
    wait_for("resolved", lambda: scene.incidents("no_progress", "resolved"))
    assert not scene.incidents("dead_rank", "firing")


def test_daemon_killed_rank_is_named(scene: Scene) -> None:
    """SIGKILL: dead_rank names it, with the step it died after; the others live."""
    scene.ranks[2].kill()
    (incident,) = wait_for("dead", scene.firing("dead_rank"))
    assert (incident["rank"], incident["subject"]) == (2, "rank 2")
    assert "no goodbye" in incident["signals"]["process"]
    job = scene.get("/api/v1/job").json()
    assert (job["ranks_alive"], job["ranks_dead"], job["status"]) == (2, 1, "critical")


def test_daemon_rank_that_leaves_in_good_order_is_no_incident(scene: Scene) -> None:
    """All ranks end by themselves: exited, not dead."""
    for process in scene.ranks:
        assert process.stdin is not None
        process.stdin.close()
    wait_for("all gone", lambda: scene.get("/api/v1/job").json()["ranks_alive"] == 0)
    ranks = scene.get("/api/v1/ranks").json()["ranks"]
    assert [r["exit_status"] for r in ranks] == [0] * WORLD
    assert not scene.incidents("dead_rank", "firing")


def test_daemon_killed_and_restarted_picks_up(scene: Scene) -> None:
    """The job does not notice, and the next daemon knows the steps before its time."""
    scene.daemon.kill()
    scene.daemon.wait()
    scene.daemon = scene.spawn_daemon()
    wait_for("steps known", lambda: scene.step() >= 10)
    before = scene.step()
    wait_for("steps go on", lambda: scene.step() > before + 5)
    assert all(p.poll() is None for p in scene.ranks)
    assert scene.get("/api/v1/incidents").json() == {"incidents": []}


def test_daemon_sigterm_ends_cleanly(scene: Scene) -> None:
    """Exit code 0, soon, without a traceback turned into an error."""
    scene.daemon.terminate()
    assert scene.daemon.wait(timeout=10) == 0
    assert all(p.poll() is None for p in scene.ranks)


def test_daemon_tells_its_webhook_signed_and_spares_the_job(tmp_path: Path) -> None:
    """Fired and resolved arrive once each, with a right signature."""
    state_dir = tmp_path / "state"
    with WebhookReceiver(load_secret(state_dir, environ={})) as receiver:
        flags = ("--webhook-url", receiver.url, "--state-dir", str(state_dir))
        scene = Scene(tmp_path / "run", *flags)
        try:
            wait_for("ten steps", lambda: scene.step() >= 10)
            os.kill(scene.ranks[0].pid, signal.SIGSTOP)
            wait_for("stuck", scene.firing("no_progress"))
            os.kill(scene.ranks[0].pid, signal.SIGCONT)
            receiver.wait_for(lambda kept: len(kept) >= 2, TIMEOUT_S)
            hooks = wait_for(
                "both delivered",
                lambda: (
                    (h := scene.get("/api/v1/report").json()["webhooks"])["delivered"] == 2 and h
                ),
            )
        finally:
            scene.close()
    kinds = [json.loads(r.body)["type"] for r in receiver.received]
    assert kinds == ["nutp.incident.fired", "nutp.incident.resolved"]
    assert not any(r.error for r in receiver.received)
    assert hooks["sent"] == 2


def test_daemon_tells_its_alertmanager(tmp_path: Path) -> None:
    """A stopped rank is an alert while it stands still; a killed one is; each links to the page."""
    with start_alertmanager(tmp_path) as server:
        scene = Scene(tmp_path / "run", "--alertmanager-url", server.url)

        def shown(name: str) -> list[Data]:
            alerts = httpx.get(f"{server.url}/api/v2/alerts", trust_env=False).json()
            return [a for a in alerts if a["labels"]["alertname"] == name]

        try:
            wait_for("ten steps", lambda: scene.step() >= 10)
            os.kill(scene.ranks[1].pid, signal.SIGSTOP)
            (stuck,) = wait_for("stuck in Alertmanager", lambda: shown("NutpJobStuck"))
            os.kill(scene.ranks[1].pid, signal.SIGCONT)
            wait_for("no longer stuck in Alertmanager", lambda: not shown("NutpJobStuck"))
            scene.ranks[2].kill()
            (dead,) = wait_for("dead in Alertmanager", lambda: shown("NutpRankDead"))
            (incident,) = scene.incidents("dead_rank", "firing")
            address = read_address(scene.run_dir)
        finally:
            scene.close()
    assert (stuck["labels"]["rank"], stuck["labels"]["severity"]) == ("1", "critical")
    assert dead["labels"] == {
        "alertname": "NutpRankDead",
        "check": "dead_rank",
        "incident": incident["id"],
        "nutp_job": "fake",
        "rank": "2",
        "replica": "0",
        "severity": "critical",
        "subject": "rank 2",
    }
    assert dead["annotations"]["summary"] == incident["summary"]
    assert address is not None and dead["generatorURL"] == f"{address[1]}/"


def test_daemon_says_that_it_is_blind_when_the_run_dir_is_gone(tmp_path: Path) -> None:
    """No run directory: healthy, not ready, with the reason."""
    daemon = Daemon(load({"port": 0}).config, tmp_path / "never-made")
    daemon.start()
    try:
        wait_for("ticking", lambda: httpx.get(daemon.url + "/healthz").status_code == 200)
        answer = httpx.get(daemon.url + "/readyz")
    finally:
        daemon.stop()
    assert answer.status_code == 503
    assert "never-made is gone or not made yet" in answer.json()["reason"]


def test_daemon_survives_a_failing_tick_and_keeps_the_first_traceback(tmp_path: Path) -> None:
    """A fault in a check is counted; the next tick runs; the metric says how many failed."""

    class Failing:
        name = "slow_rank"

        def applies(self, job: JobState) -> bool:
            return True

        def ready(self, job: JobState) -> bool:
            raise RuntimeError("of this test")

        def run(self, job: JobState, now_ns: int) -> list[Finding]:
            return []

    daemon = Daemon(load({"port": 0}).config, tmp_path, checks=[Failing()])
    try:
        daemon.tick()
        daemon.tick()
    finally:
        daemon.stop()
    assert daemon.tick_errors == 2
    assert "of this test" in daemon.first_error
