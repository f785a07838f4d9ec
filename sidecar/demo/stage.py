"""All processes and files of a demo: made together, ended together, on every way out."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ntp_core.job import JobConfig
from ntp_core.lifeline import start_tied
from sidecar.daemon import read_address
from sidecar.demo.client import CannotStart, StoryBroken
from sidecar.demo.scenario import Scenario
from sidecar.launch import child_environment
from sidecar.notify.receiver import WebhookReceiver
from sidecar.notify.signer import load_secret
from sidecar.proposals import Autopilot
from sidecar.wire.holders import open_run_dir, release_run_dir, remove_stale
from sidecar.wire.rundir import known_bases

START_S = 30.0
STOP_S = 10.0
BAD_INPUT = 2
LOGS = ("job.log", "sidecar.log", "reference.log")
TAIL_LINES = 12
TAIL_BYTES = 16384
ENGINE_OBSERVER = "sidecar.probe.attach:attach_engine"


@dataclass(slots=True)
class Stage:
    """The running demo.

    Attributes:
        run_dir: where rings lie, and where faults, proposals and the wish to stop are left.
        work_dir: configs, losses, logs and the webhook outbox.
        job, sidecar: processes.
    """

    job_id: str
    run_dir: Path
    work_dir: Path
    receiver: WebhookReceiver
    sidecar: subprocess.Popen[bytes]
    job: subprocess.Popen[bytes]
    url: str

    @property
    def losses(self) -> Path:
        """Rank 0 writes the losses of all steps here when the job ends."""
        return self.work_dir / "losses.json"

    @property
    def has_page(self) -> bool:
        """Whether the sidecar still serves the page."""
        return self.sidecar.poll() is None

    def wrong(self) -> str:
        """What has ended that should run; "" when nothing has."""
        if not self.has_page:
            return f"the sidecar ended with {self.sidecar.returncode}"
        if self.job.poll() is not None:
            return f"the job ended with {self.job.returncode}"
        return ""

    def log_tail(self) -> str:
        """The last lines of each log; the files go with the stage."""
        return tail_of(self.work_dir)


@contextmanager
def build_stage(
    scenario: Scenario, port: int | None, autopilot: Autopilot = Autopilot.ACT
) -> Iterator[Stage]:
    """Start sidecar, webhook receiver and job; end them all when the block is left.

    Args:
        port: of the page; None takes 9440, or any free one when that is taken.
        autopilot: what the sidecar does about a slow rank; unless it acts, the rank stays slow
            for as long as it is slowed.
    """
    with ExitStack() as stack:
        for base in known_bases():
            remove_stale(base)
        job_id = f"demo-{secrets.token_hex(3)}"
        run_dir = open_run_dir(job_id, known_bases())
        stack.callback(release_run_dir, run_dir, STOP_S)
        work_dir = run_dir / "demo"  # goes with it, also when a later start clears what was left
        work_dir.mkdir(mode=0o700)
        secret = load_secret(work_dir, environ={})
        receiver = stack.enter_context(WebhookReceiver(secret))
        sidecar = _start_sidecar(run_dir, work_dir, receiver.url, port, autopilot)
        stack.callback(end_process, sidecar)
        url = _wait_for_page(run_dir, work_dir, sidecar)
        job = _start_job(scenario, run_dir, work_dir, job_id)
        stack.callback(end_process, job)
        yield Stage(job_id, run_dir, work_dir, receiver, sidecar, job, url)


def reference_process(config: JobConfig, work_dir: Path, losses: Path) -> subprocess.Popen[bytes]:
    """The same training in one process, without a sidecar."""
    path = work_dir / "reference.json"
    path.write_text(config.to_json())
    command = [sys.executable, "-m", "ntp_core.runtime.train", "--config", str(path)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RANK", "WORLD_SIZE", "NTP_"))}
    return _spawn([*command, "--losses", str(losses)], env, work_dir / "reference.log")


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, then make it."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _start_sidecar(
    run_dir: Path, work_dir: Path, webhook: str, port: int | None, autopilot: Autopilot
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "sidecar", "daemon", "--run-dir", str(run_dir)]
    command += [
        "--autopilot",
        autopilot,
        "--webhook-url",
        webhook,
        "--state-dir",
        str(work_dir),
        "--proposal-return-steps",  # the story ends with the shares of the slowed rank as they are
        "0",
    ]
    if port is not None:
        command += ["--port", str(port)]
    return _spawn(command, dict(os.environ), work_dir / "sidecar.log")


def _wait_for_page(run_dir: Path, work_dir: Path, sidecar: subprocess.Popen[bytes]) -> str:
    """The page's address, once it is served."""
    for _ in range(int(START_S / 0.05)):
        address = read_address(run_dir)
        if address is not None:
            return address[1]
        try:
            sidecar.wait(0.05)
        except subprocess.TimeoutExpired:
            continue
        break
    if sidecar.poll() == BAD_INPUT:  # it has said why, in one line
        lines = (work_dir / "sidecar.log").read_text().strip().splitlines()
        raise CannotStart(lines[-1] if lines else "the sidecar refused its settings")
    raise StoryBroken(f"the sidecar did not start\n{tail_of(work_dir)}".rstrip())


def _start_job(
    scenario: Scenario, run_dir: Path, work_dir: Path, job_id: str
) -> subprocess.Popen[bytes]:
    config = work_dir / "job.json"
    config.write_text(scenario.job().to_json())
    losses = work_dir / "losses.json"
    rank = [sys.executable, "-m", "ntp_core.runtime.train", "--config", str(config)]
    command = [sys.executable, "-m", "ntp_core.runtime.launch", "--ranks", str(scenario.num_ranks)]
    env = child_environment(
        {
            "NTP_SIDECAR_RUN_DIR": str(run_dir),
            "NTP_SIDECAR_JOB_ID": job_id,
            "NTP_OBSERVER": ENGINE_OBSERVER,
            "NTP_INBOX": str(run_dir),
        }
    )
    return _spawn([*command, "--", *rank, "--losses", str(losses)], env, work_dir / "job.log")


def _spawn(command: Sequence[str], env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """A child with its output in a file, that ends when this process dies."""
    with log.open("wb") as stream:
        return start_tied(command, env, signal.SIGTERM, stream)


def tail_of(work_dir: Path) -> str:
    """The last lines of the logs in a directory, each with the name of its file."""
    lines = []
    for name in LOGS:
        path = work_dir / name
        if path.exists():
            with path.open("rb") as stream:
                stream.seek(max(0, path.stat().st_size - TAIL_BYTES))
                text = stream.read().decode(errors="replace")
            lines += [f"{name}: {line}" for line in text.strip().splitlines()[-TAIL_LINES:]]
    return "\n".join(lines) or "the logs are empty"
