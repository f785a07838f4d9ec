"""The wrapper: exit status, signals and output pass through."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sidecar.launch import BOOTSTRAP_DIR, child_environment, run_command

WRAPPER = """
import sys
from sidecar.launch import run_command
sys.exit(run_command(sys.argv[1:], {"NUTP_ADDED": "yes"}))
"""


def _python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


@pytest.mark.parametrize("status", [0, 1, 3, 255])
def test_exit_status_passes_through(status: int):
    """As if the command had been started directly."""
    assert run_command(_python(f"raise SystemExit({status})"), {}) == status


def test_end_by_a_signal_is_told_as_a_shell_tells_it():
    """128 + n."""
    assert run_command(_python("import os; os.kill(os.getpid(), 9)"), {}) == 137


def test_command_that_cannot_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """127 when it is not there, 126 when it may not be run; the name is in the message."""
    assert run_command(["no-such-program-x"], {}) == 127
    (tmp_path / "plain").write_text("")
    assert run_command([str(tmp_path / "plain")], {}) == 126
    assert "no-such-program-x" in capsys.readouterr().err
    with pytest.raises(ValueError, match="--"):
        run_command([], {})


def test_output_and_input_are_the_commands_own():
    """Nothing is added to stdout or stderr."""
    script = "import sys, os; print(sys.stdin.read() + os.environ['NUTP_ADDED'])"
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER, *_python(script)],
        input="in ",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.stderr, done.returncode) == ("in yes\n", "", 0)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_goes_on_to_the_command(signum: signal.Signals):
    """The command decides what it means."""
    script = """
import signal, sys
def got(signum, frame):
    print("got", signum, flush=True)
    sys.exit(7)
for s in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(s, got)
print("ready", flush=True)
signal.pause()
"""
    wrapper = subprocess.Popen(
        [sys.executable, "-c", WRAPPER, *_python(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert wrapper.stdout is not None
    assert wrapper.stdout.readline() == "ready\n"
    wrapper.send_signal(signum)
    out, _ = wrapper.communicate(timeout=60)
    assert (out, wrapper.returncode) == (f"got {int(signum)}\n", 7)


def test_ignored_signal_stays_ignored_for_the_command():
    """Under nohup a hang-up must not reach the command as one that ends it."""
    script = "import signal; print(signal.getsignal(signal.SIGHUP) is signal.SIG_IGN)"
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    done = subprocess.run(
        [sys.executable, "-c", ignore + WRAPPER, *_python(script)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.stdout, done.returncode) == ("True\n", 0)


def test_handlers_are_put_back():
    """A caller's own handlers hold again afterwards."""
    before = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    run_command(_python("pass"), {})
    after = [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    assert after == before


def test_pid_of_the_command_is_told():
    """Before its end, to whoever asked."""
    told: list[int] = []
    script = "import os, sys; sys.exit(os.getppid() != int(sys.argv[1]))"
    assert run_command([*_python(script), str(os.getpid())], {}, told.append) == 0
    assert len(told) == 1 and told[0] != os.getpid()


def test_runs_from_another_thread():
    """Without forwarding: Python allows handlers in the main thread only."""
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(run_command(_python("exit(4)"), {})))
    thread.start()
    thread.join(timeout=60)
    assert got == [4]


def test_bootstrap_comes_first_and_no_empty_entry_is_made():
    """An empty entry of PYTHONPATH would be the working directory."""
    assert child_environment({}, {})["PYTHONPATH"] == str(BOOTSTRAP_DIR)
    assert child_environment({}, {"PYTHONPATH": ""})["PYTHONPATH"] == str(BOOTSTRAP_DIR)
    env = child_environment({"A": "1"}, {"PYTHONPATH": "/x:/y", "B": "2"})
    assert env == {"PYTHONPATH": f"{BOOTSTRAP_DIR}{os.pathsep}/x:/y", "A": "1", "B": "2"}
    assert (BOOTSTRAP_DIR / "sitecustomize.py").is_file()
