"""Ties the life of a child process to that of its parent, so that no rank outlives its launcher.

Source: prctl(2), PR_SET_PDEATHSIG. It is kept over exec and is not inherited by fork. Elsewhere
than on Linux children are not tied.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO

_PR_SET_PDEATHSIG = 1
_HELD = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def start_tied(
    command: Sequence[str],
    env: Mapping[str, str],
    number: signal.Signals,
    output: IO[bytes] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a child, in a session of its own, that gets a signal when this process is gone.

    The kernel watches the thread that starts the child, not the process: a child that is started
    in another thread than the main one, which ends last, is not tied.

    Args:
        number: the signal; SIGKILL also ends a child that is stopped.
        output: where its stdout and stderr go; default: where ours go.

    Raises:
        OSError: it cannot be started.
    """
    tie = _tie(number)
    with _signals_held() if tie else contextlib.nullcontext():
        return subprocess.Popen(
            list(command),
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=tie,
        )


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Give signals to the caller's handlers only afterwards. Main thread only.

    Python runs hooks around a fork and swallows what is raised in them: there a handler that raises
    would be heard by nobody.
    """
    held: list[int] = []
    before = {
        s: signal.signal(s, lambda number, _frame: held.append(number))
        for s in _HELD
        if callable(signal.getsignal(s))
    }
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
        for number in held:
            signal.raise_signal(number)


def _tie(number: signal.Signals) -> Callable[[], None] | None:
    """What the child must do before its program; None where it cannot be tied."""
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: a forked child should do as little as can be
    parent = os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it died before the line above took effect
            os.kill(os.getpid(), signal.SIGKILL)

    return tie
