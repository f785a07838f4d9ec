"""Starts the command that is to be watched, and stays out of its way.

The child gets our bootstrap directory first on PYTHONPATH and inherits stdin, stdout and stderr
untouched. Signals sent to this process go on to it; its exit status becomes ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

BOOTSTRAP_DIR = Path(__file__).resolve().parent / "probe" / "bootstrap"
NOT_FOUND = 127  # as a shell says it
NOT_EXECUTABLE = 126
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def child_environment(
    additions: Mapping[str, str], inherited: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Environment of the watched command: inherited, plus additions, plus the bootstrap."""
    env = dict(os.environ if inherited is None else inherited)
    env.update(additions)
    # an empty entry would mean the working directory
    rest = env.get("PYTHONPATH")
    env["PYTHONPATH"] = f"{BOOTSTRAP_DIR}{os.pathsep}{rest}" if rest else str(BOOTSTRAP_DIR)
    return env


def run_command(
    cmd: Sequence[str],
    env_additions: Mapping[str, str],
    started: Callable[[int], object] | None = None,
) -> int:
    """Run a command to its end.

    Args:
        cmd: program and arguments; the program is looked up on PATH.
        env_additions: variables for the probe: NTP_SIDECAR_RUN_DIR, NTP_SIDECAR_JOB_ID.
        started: called with the pid of the command.

    Returns:
        its exit status; 128 + n if signal n ended it; 127 or 126 if it could not be started.
    """
    if not cmd:
        raise ValueError("no command to run; put it after '--'")
    waiting: list[int] = []
    child: list[subprocess.Popen[bytes]] = []

    def forward(signum: int, frame: FrameType | None) -> None:
        if not child:
            waiting.append(signum)
        elif not (signum == signal.SIGINT and _is_terminals_job()):
            child[0].send_signal(signum)

    with _handlers(forward):
        try:
            child.append(subprocess.Popen(list(cmd), env=child_environment(env_additions)))
        except OSError as error:
            sys.stderr.write(f"ntp-sidecar: cannot start {cmd[0]!r}: {error.strerror}\n")
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        if started is not None:
            started(child[0].pid)
        for signum in waiting:
            child[0].send_signal(signum)
        status = child[0].wait()
    return 128 - status if status < 0 else status


def _is_terminals_job() -> bool:
    """Whether we are the terminal's foreground job: then Ctrl-C reached the child by itself."""
    try:
        return os.tcgetpgrp(sys.__stdin__.fileno() if sys.__stdin__ else 0) == os.getpgrp()
    except (OSError, ValueError):
        return False


@contextmanager
def _handlers(forward: signal._HANDLER) -> Iterator[None]:
    """Forward signals while in here. Python allows handlers in the main thread only.

    A signal that is ignored (nohup) stays so, for the command too: a handler would be reset there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = [s for s in _FORWARDED if signal.getsignal(s) is not signal.SIG_IGN]
    before = {s: signal.signal(s, forward) for s in heard}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
