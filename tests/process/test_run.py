"""`ntp-sidecar run` and its sidecar when things around them break: the job runs all the same."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from sidecar.config import load
from sidecar.daemon import read_address
from sidecar.run import RunRequest, run
from sidecar.status import find_url
from sidecar.wire.holders import claim, holders
from sidecar.wire.rundir import SHARED_MEMORY, run_dir_path, user_dir
from tests.support.servers import wait_until

SIDECAR = [sys.executable, "-W", "error", "-m", "sidecar"]
WAITING = "input()"  # until its stdin closes
RANK = "from sidecar.probe.attach import attach; attach(hooks=False).step_begin(1); input()"
TIMEOUT_S = 30.0


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the caller's reaches a test."""
    for name in [n for n in os.environ if n.startswith(("NTP_", "OTEL_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def job_id() -> str:
    """An id that nobody else uses."""
    return f"test-run-{secrets.token_hex(4)}"


@pytest.fixture
def runs() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts commands of ours with pipes; ends them all, and what they started."""
    started: list[subprocess.Popen[str]] = []

    def start(*args: str) -> subprocess.Popen[str]:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen([*SIDECAR, *args], text=True, start_new_session=True, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run_args(job_id: str, script: str) -> list[str]:
    """The arguments of a run of a Python script."""
    return ["run", "--port", "0", "--job-id", job_id, "--", sys.executable, "-c", script]


def sidecar_pid(run_dir: Path) -> int:
    """The pid of the sidecar of a run directory, once it serves."""
    wait_until(lambda: read_address(run_dir), "the sidecar is up", TIMEOUT_S)
    address = read_address(run_dir)
    assert address is not None
    return address[0]


def is_gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# -- what a sidecar may remove


def test_orphan_sidecar_never_removes_a_directory_that_is_no_run_directory(tmp_path: Path) -> None:
    """Its parent goes, it goes too, and the directory it was given stays as it was."""
    precious = tmp_path / "precious"
    precious.mkdir()
    for name in ("stop", "thesis.txt"):
        (precious / name).touch()
    daemon = f"{[*SIDECAR, 'daemon', '--port', '0', '--run-dir', str(precious)]!r}"
    parent = (
        "import os, subprocess;"
        f"p = subprocess.Popen([*{daemon}, '--parent-pid', str(os.getpid())]);"
        "print(p.pid, flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert sidecar_pid(precious) == pid
        process.kill()
    wait_until(lambda: is_gone(pid), "the sidecar ends", TIMEOUT_S)
    assert {"stop", "thesis.txt"} <= {p.name for p in precious.iterdir()}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--run-dir", ""], "--run-dir is ''"),
        (["--run-dir", __file__], "give the job's run directory"),
        (["--run-dir", ".", "--parent-pid", "1"], "--parent-pid 1 is not the parent"),
        (["--run-dir", ".", "--parent-pid", "0"], "--parent-pid 0 is not the parent"),
        (["--run-dir", ".", "--parent-pid", "\u0663"], "not a process id"),
        (["--run-dir", ".", "--job-id", "../x"], "job id '../x'"),
        (["--run-dir", "a b"], "job id 'a b'"),
    ],
)
def test_daemon_refuses_bad_arguments_in_one_line(
    runs: Callable[..., subprocess.Popen[str]], args: list[str], said: str
) -> None:
    """Before it watches, serves or removes anything."""
    out, err = runs("daemon", "--port", "0", *args).communicate(timeout=TIMEOUT_S)
    assert out == ""
    assert said in err.splitlines()[-1]
    assert "Traceback" not in err


# -- one job, one directory


def test_run_with_the_id_of_a_living_job_is_refused(
    runs: Callable[..., subprocess.Popen[str]], job_id: str
) -> None:
    """One line and code 2; the first run keeps its directory and ends as it would have."""
    first = runs(*run_args(job_id, WAITING))
    run_dir = run_dir_path(job_id, SHARED_MEMORY)
    sidecar_pid(run_dir)
    second = runs(*run_args(job_id, "print('ran')"))
    out, err = second.communicate(timeout=TIMEOUT_S)
    assert (second.returncode, out, err.count("\n")) == (2, "", 1)
    assert f"'{job_id}' is in use by process" in err
    assert read_address(run_dir) is not None
    first.communicate("\n", timeout=TIMEOUT_S)
    assert first.returncode == 0
    assert not run_dir.exists()


def test_run_clears_the_inbox_of_a_dead_job_of_its_name(
    runs: Callable[..., subprocess.Popen[str]], job_id: str
) -> None:
    """A wish to stop that a killed run never took must not end the next one."""
    run_dir = run_dir_path(job_id, SHARED_MEMORY)
    run_dir.mkdir(mode=0o700, parents=True)
    for name in ("stop", "proposal.json", "fault-1.json", "facts.json"):
        (run_dir / name).write_text("{}")
    script = "import os; print(*sorted(os.listdir(os.environ['NTP_SIDECAR_RUN_DIR'])))"
    out, _ = runs(*run_args(job_id, script)).communicate(timeout=TIMEOUT_S)
    names = out.split()
    assert "daemon.json" in names
    assert all(n.startswith("owner-") for n in names if n != "daemon.json")


# -- who outlives whom


def test_run_killed_before_a_rank_appeared_keeps_its_sidecar(
    runs: Callable[..., subprocess.Popen[str]], job_id: str, tmp_path: Path
) -> None:
    """The sidecar stays for the command, sees its rank, and leaves when both have ended."""
    go = tmp_path / "go"
    os.mkfifo(go)
    child = runs(*run_args(job_id, f"open({str(go)!r}).read(); {RANK}"))
    run_dir = run_dir_path(job_id, SHARED_MEMORY)
    watcher = sidecar_pid(run_dir)
    wait_until(lambda: len(holders(run_dir)) == 3, "run, sidecar and command hold it", TIMEOUT_S)
    (command,) = holders(run_dir) - {watcher, child.pid}
    child.kill()
    child.wait()
    wait_until(lambda: psutil.Process(watcher).ppid() != child.pid, "an orphan", TIMEOUT_S)
    # Longer than the sidecar of a job without processes would stay.
    looks = iter(range(200))
    wait_until(lambda: next(looks) == 199, "four seconds of looks", TIMEOUT_S)
    assert not is_gone(watcher)
    go.write_text("")
    wait_until(lambda: list(run_dir.glob("*.ring")), "the rank appears", TIMEOUT_S)
    os.kill(command, signal.SIGKILL)
    wait_until(lambda: is_gone(watcher), "the sidecar ends", TIMEOUT_S)
    assert not run_dir.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_run_signalled_ends_job_sidecar_and_ranks(
    runs: Callable[..., subprocess.Popen[str]], job_id: str, number: signal.Signals
) -> None:
    """The launcher hears what was sent to us, ends its ranks, and its code is ours."""
    pytest.importorskip("torch")
    launch = [sys.executable, "-m", "ntp_core.runtime.launch", "--ranks", "2", "--"]
    rank = [sys.executable, "-c", "import signal; signal.pause()"]
    child = runs("run", "--port", "0", "--job-id", job_id, "--", *launch, *rank)
    run_dir = run_dir_path(job_id, SHARED_MEMORY)
    watcher = sidecar_pid(run_dir)
    found: list[psutil.Process] = []

    def look() -> bool:
        found[:] = [p for p in psutil.Process(child.pid).children(True) if p.pid != watcher]
        return len(found) == 3

    wait_until(look, "the launcher and two ranks", 60)
    child.send_signal(number)
    child.communicate(timeout=60)
    assert child.returncode == 128 + number
    wait_until(lambda: all(is_gone(p.pid) for p in found), "no orphan", TIMEOUT_S)
    assert is_gone(watcher)
    assert not run_dir.exists()


def _loads_commands(process: subprocess.Popen[str], run_dir: Path) -> bool:
    """Python is up and in the middle of the imports, far from the first line of `run`."""
    return "_ssl." in Path(f"/proc/{process.pid}/maps").read_text() and not run_dir.exists()


def _starts_sidecar(process: subprocess.Popen[str], run_dir: Path) -> bool:
    return run_dir.exists() and bool(psutil.Process(process.pid).children())


@pytest.mark.parametrize("moment", [_loads_commands, _starts_sidecar])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_run_interrupted_before_the_job_leaves_nothing(
    runs: Callable[..., subprocess.Popen[str]],
    job_id: str,
    moment: Callable[[subprocess.Popen[str], Path], bool],
    number: signal.Signals,
) -> None:
    """No traceback, the shell's code for the signal, no job, no sidecar, no directory."""
    process = runs(*run_args(job_id, "print('ran')"))
    run_dir = run_dir_path(job_id, SHARED_MEMORY)
    wait_until(lambda: moment(process, run_dir), "the moment", TIMEOUT_S)
    children = psutil.Process(process.pid).children()
    process.send_signal(number)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode in (128 + number, -number)
    assert (out, err) == ("", "")
    assert all(is_gone(p.pid) for p in children)
    assert not run_dir.exists()


# -- a place for rings that will not do


def _file(base: Path) -> None:
    user_dir(base).touch()


def _link(base: Path) -> None:
    user_dir(base).symlink_to(base)


def _foreign(base: Path) -> None:
    user_dir(base).mkdir()
    os.chown(user_dir(base), 12345, 12345)


def _no_base(base: Path) -> None:
    base.rmdir()


SPOILT = [_file, _link, _no_base] + ([_foreign] if os.getuid() == 0 else [])


@pytest.mark.parametrize("spoil", SPOILT)
def test_run_without_a_place_for_rings_runs_the_job_unwatched(
    tmp_path: Path, spoil: Callable[[Path], None], capfd: pytest.CaptureFixture[str], job_id: str
) -> None:
    """One line says what is wrong, the job's code passes through, nothing is left."""
    base = tmp_path / "base"
    base.mkdir()
    spoil(base)
    before = sorted(base.rglob("*")) if base.exists() else []
    script = "import os; print(repr(os.environ['NTP_SIDECAR_RUN_DIR'])); exit(37)"
    cmd = [sys.executable, "-c", script]
    request = RunRequest(cmd=cmd, job_id=job_id, loaded=load({"port": 0}), bases=[base])
    assert run(request) == 37
    out, err = capfd.readouterr()
    assert out == "''\n"
    assert err.count("\n") == 1
    assert "unwatched" in err and str(base) in err
    assert before == (sorted(base.rglob("*")) if base.exists() else [])


def test_run_falls_back_to_the_next_base_and_is_found_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], job_id: str
) -> None:
    """The job is watched all the same; other commands look below every base."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    _file(first)
    script = (
        "import json, os, pathlib;"
        "p = pathlib.Path(os.environ['NTP_SIDECAR_RUN_DIR']);"
        "from sidecar.status import find_url;"
        "own = json.loads((p / 'daemon.json').read_text())['url'];"
        "bases = [p.parents[2] / 'first', p.parents[1]];"
        "print(p, find_url(bases, {}) == own)"
    )
    cmd = [sys.executable, "-c", script]
    request = RunRequest(cmd=cmd, job_id=job_id, loaded=load({"port": 0}), bases=[first, second])
    assert run(request) == 0
    out, err = capfd.readouterr()
    assert out == f"{run_dir_path(job_id, second)} True\n"
    assert f"rings go to {second}" in err and str(first) in err
    assert not run_dir_path(job_id, second).exists()


def test_run_refuses_bad_settings_also_without_a_place_for_rings(
    runs: Callable[..., subprocess.Popen[str]],
) -> None:
    """What was asked for and cannot be is said before the job starts."""
    child = runs("run", "--host", "", "--", sys.executable, "-c", "print('ran')")
    out, err = child.communicate(timeout=TIMEOUT_S)
    assert (child.returncode, out, err.count("\n")) == (2, "", 1)


def test_find_url_of_a_sidecar_that_died_is_the_default(tmp_path: Path) -> None:
    """An address whose process is gone is nobody's."""
    run_dir = run_dir_path("job", tmp_path)
    run_dir.mkdir(parents=True)
    claim(run_dir)
    (run_dir / "daemon.json").write_text(json.dumps({"pid": 2**22 + 1, "url": "http://x"}))
    assert find_url([tmp_path], {}) == "http://127.0.0.1:9440"
