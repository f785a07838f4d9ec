"""`ntp-sidecar run`: the job in front, its sidecar in a process of its own beside it.

The sidecar may die and the job does not notice; the job's exit status is ours. The run directory is
made before either of them and removed when both are over.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from sidecar.config import ENV_PREFIX, Config, Loaded
from sidecar.daemon import read_address
from sidecar.launch import run_command
from sidecar.wire.rundir import create_run_dir, default_base, remove_run_dir, remove_stale

START_TIMEOUT_S = 15.0
STOP_TIMEOUT_S = 8.0
"""The sidecar ends by itself in less: its outlets have time limits of their own."""
BAD_INPUT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What to run. An empty `job_id` makes one."""

    cmd: Sequence[str]
    job_id: str
    loaded: Loaded


def run(request: RunRequest, env: Mapping[str, str] = os.environ) -> int:
    """Run the command under watch; returns its exit status, or 2 when nothing was started."""
    base = default_base()
    remove_stale(base)
    job_id = request.job_id or f"run-{os.getpid()}-{time.time_ns() // 1_000_000_000}"
    run_dir = create_run_dir(job_id, base)
    try:
        sidecar = _start(run_dir, job_id, request.loaded, env)
        if sidecar.poll() is not None and sidecar.returncode == BAD_INPUT:
            return BAD_INPUT  # it has said why on stderr; the job has not been started
        _say_where(run_dir, job_id, sidecar)
        try:
            return run_command(
                request.cmd,
                {
                    "NTP_SIDECAR_RUN_DIR": str(run_dir),
                    "NTP_SIDECAR_JOB_ID": job_id,
                    # heard by jobs that are built on the engine
                    "NTP_OBSERVER": "sidecar.probe.attach:attach_engine",
                    "NTP_INBOX": str(run_dir),
                },
            )
        finally:
            _stop(sidecar)
    finally:
        remove_run_dir(run_dir)


def settings_as_environment(loaded: Loaded) -> dict[str, str]:
    """Every setting that is not a default, as variables: secrets must not be in a process list."""
    return {
        ENV_PREFIX + f.name.upper(): str(getattr(loaded.config, f.name))
        for f in fields(Config)
        if loaded.sources[f.name] != "default"
    }


def _start(
    run_dir: Path, job_id: str, loaded: Loaded, env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start the sidecar and wait until it serves or has given up."""
    cmd = [sys.executable, "-m", "sidecar", "daemon", "--run-dir", str(run_dir)]
    sidecar = subprocess.Popen(
        [*cmd, "--job-id", job_id, "--parent-pid", str(os.getpid())],
        env={**env, **settings_as_environment(loaded)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        # Ctrl-C ends the job; the sidecar must live to see that.
        start_new_session=True,
    )
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while not _serves(run_dir, sidecar) and time.monotonic() < deadline_s:
        try:
            sidecar.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        break
    return sidecar


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
    if sidecar.poll() is not None:
        sys.stderr.write(
            f"ntp-sidecar: the sidecar ended before the job, with status {sidecar.returncode}\n"
        )
        return
    sidecar.terminate()
    try:
        sidecar.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        sidecar.kill()
        sidecar.wait()
