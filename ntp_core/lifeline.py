"""Ties the life of a child process to that of its parent, so that no rank outlives its launcher.

Source: prctl(2), PR_SET_PDEATHSIG. It is kept over exec and is not inherited by fork. Elsewhere
than on Linux children are not tied.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """What a child must run before its program (`preexec_fn`), to get a signal when we are gone.

    None where it cannot be had: the kernel watches the thread that starts the child, not the
    process, so that only the main thread, which ends last, may start children that are tied.
    """
    if sys.platform != "linux" or threading.current_thread() is not threading.main_thread():
        return None
    prctl = ctypes.CDLL(None).prctl  # looked up here: a forked child should do as little as can be
    parent = os.getpid()

    def tie() -> None:
        prctl(_PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it died before the line above took effect
            os.kill(os.getpid(), signal.SIGKILL)

    return tie
