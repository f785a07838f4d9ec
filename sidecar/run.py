"""`ntp-sidecar run`: the job in front, its sidecar in a process of its own beside it.

The job is what counts. It runs to its own end and its exit status is ours, whatever becomes of the
sidecar or of the place for rings: then it runs unwatched, and one line says why. Only what was
asked for and cannot be (a setting, a job id that is in use) ends this before the job has started.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import FrameType, TracebackType

from sidecar.config import ENV_PREFIX, Config, Loaded
from sidecar.daemon import read_address
from sidecar.launch import run_command
from sidecar.wire.holders import claim, open_run_dir, release_run_dir, remove_stale
from sidecar.wire.rundir import known_bases

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 8.0
"""The sidecar ends by itself in less: its outlets have time limits of their own."""
RELEASE_S = 2.0
"""How long ranks may take to be gone after their launcher."""
BAD_INPUT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run. An empty `job_id` makes one; `bases`: where rings may lie, best first."""

    cmd: Sequence[str]
    job_id: str
    loaded: Loaded
    bases: Sequence[Path] = field(default_factory=known_bases)


def run(request: RunRequest, env: Mapping[str, str] = os.environ) -> int:
    """Run the command under watch.

    Returns:
        its exit status; 2 when a setting is refused, 128 + n when signal n came before its start.

    Raises:
        BadJobId, RunDirInUse: nothing was started.
    """
    for base in request.bases:
        remove_stale(base)
    job_id = request.job_id or f"run-{os.getpid()}-{time.time_ns() // 1_000_000_000}"
    with _Signals() as signals:
        return _run(request, job_id, env, signals)


def _run(request: RunRequest, job_id: str, env: Mapping[str, str], signals: _Signals) -> int:
    try:
        run_dir = open_run_dir(job_id, request.bases)
    except OSError as error:
        sys.stderr.write(f"ntp-sidecar: the job runs unwatched: {error}\n")
        return run_command(request.cmd, {"NTP_SIDECAR_RUN_DIR": "", "NTP_SIDECAR_DISABLE": "1"})

    def started(pid: int) -> None:
        with contextlib.suppress(OSError):  # the sidecar stays for it if we are killed
            claim(run_dir, pid)
        if signals.number is not None:  # in the moment before the job could hear it
            os.kill(pid, signals.number)

    sidecar: subprocess.Popen[bytes] | None = None
    try:
        sidecar = _spawn(run_dir, job_id, request.loaded, env)
        if sidecar is not None:
            _wait_until_up(run_dir, sidecar, signals)
            if signals.number is not None:
                return 128 + signals.number
            if sidecar.poll() != BAD_INPUT:
                _say_where(run_dir, job_id, sidecar)
            if (status := sidecar.poll()) is not None:
                sidecar = None  # it has said why on stderr
            if status == BAD_INPUT:
                return BAD_INPUT  # the job has not been started
        return run_command(request.cmd, _job_environment(run_dir, job_id), started)
    finally:
        if sidecar is not None:
            _stop(sidecar)
        release_run_dir(run_dir, RELEASE_S)


def _job_environment(run_dir: Path, job_id: str) -> dict[str, str]:
    return {
        "NTP_SIDECAR_RUN_DIR": str(run_dir),
        "NTP_SIDECAR_JOB_ID": job_id,
        # heard by jobs that are built on the engine
        "NTP_OBSERVER": "sidecar.probe.attach:attach_engine",
        "NTP_INBOX": str(run_dir),
    }


class _Signals:
    """SIGINT, SIGTERM and SIGHUP while the job is not there to hear them: noted, and looked at.

    A handler that raised could be swallowed by what it interrupts, or interrupt the cleaning up.

    Attributes:
        number: the one that came first; None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._before: dict[signal.Signals, signal._HANDLER] = {}

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.number = self.number or number


def settings_as_environment(loaded: Loaded) -> dict[str, str]:
    """Every setting that is not a default, as variables: secrets must not be in a process list."""
    return {
        ENV_PREFIX + f.name.upper(): str(getattr(loaded.config, f.name))
        for f in fields(Config)
        if loaded.sources[f.name] != "default"
    }


def _spawn(
    run_dir: Path, job_id: str, loaded: Loaded, env: Mapping[str, str]
) -> subprocess.Popen[bytes] | None:
    """Start the sidecar; None, with one line, when it cannot be."""
    cmd = [sys.executable, "-m", "sidecar", "daemon", "--run-dir", str(run_dir)]
    try:
        return subprocess.Popen(
            [*cmd, "--job-id", job_id, "--parent-pid", str(os.getpid())],
            env={**env, **settings_as_environment(loaded)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Ctrl-C ends the job; the sidecar must live to see that.
            start_new_session=True,
        )
    except OSError as error:
        sys.stderr.write(f"ntp-sidecar: the job runs unwatched: {error}\n")
        return None


def _wait_until_up(run_dir: Path, sidecar: subprocess.Popen[bytes], signals: _Signals) -> None:
    """Wait until the sidecar serves or has given up, or a signal has come."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while signals.number is None and not _serves(run_dir, sidecar):
        if time.monotonic() > deadline:
            break
        try:
            sidecar.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        break


def _serves(run_dir: Path, sidecar: subprocess.Popen[bytes]) -> bool:
    """Whether it has left its own address, not one of an earlier sidecar of the same job."""
    address = read_address(run_dir)
    return address is not None and address[0] == sidecar.pid


def _say_where(run_dir: Path, job_id: str, sidecar: subprocess.Popen[bytes]) -> None:
    address = read_address(run_dir)
    if address is not None and _serves(run_dir, sidecar) and sidecar.poll() is None:
        sys.stderr.write(f"ntp-sidecar: watching job {job_id}, page {address[1]}\n")
    else:
        sys.stderr.write("ntp-sidecar: the sidecar did not start; the job runs without it\n")


def _stop(sidecar: subprocess.Popen[bytes]) -> None:
    if sidecar.poll() is None:
        sidecar.terminate()
        try:
            status = sidecar.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            sidecar.kill()
            sidecar.wait()
            return
        if status in (0, -signal.SIGTERM):  # any other end had begun before we asked for one
            return
    sys.stderr.write(
        f"ntp-sidecar: the sidecar ended before the job, with status {sidecar.returncode}\n"
    )
