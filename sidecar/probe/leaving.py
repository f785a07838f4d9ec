"""With which status this process leaves, as far as it can be known from inside.

Python runs `atexit` without telling the status, so it is pieced together:

- the outermost frame ended with a return: 0;
- an exception that nobody caught was shown (`sys.excepthook`): 1, or 130 for Ctrl-C;
- `sys.exit`, `exit` or `quit` was called last: what that call asked for;
- else (`raise SystemExit(n)`, a program that embeds Python): unknown, which is said so; then what
  the C library was told counts (`sidecar.probe.last_word`), where it could be noted.

The wrapped functions behave as before, and nothing here may raise into the job.
"""

from __future__ import annotations

import builtins
import functools
import sys
import threading
from collections.abc import Callable
from dis import opname
from types import FrameType
from typing import Any

LISTENERS = "nutp_listeners"  # of the bootstrap's `sys.exit`
UNKNOWN = -1
FAILED = 1
INTERRUPTED = 130  # Python ends itself by SIGINT then; this is how a shell says it


class Leaving:
    """Watches for the ways out of this process. `arm` once, ask for `status` at exit.

    Args:
        progress: grows while the job goes on; a call of `sys.exit` that was caught and followed by
            progress says nothing about the end.
    """

    def __init__(self, progress: Callable[[], int]) -> None:
        self._progress = progress
        self._outermost: FrameType | None = None
        self._shown: int | None = None
        self._asked: tuple[int, int] | None = None  # status, progress at that time

    def arm(self) -> None:
        """Wrap the functions, and keep the outermost frame: it tells how it was left.

        In `sys.exit(main())` the function is looked up before `main` has made this process a rank:
        so the bootstrap has wrapped it at the start of Python, and only asks for a listener.
        """
        self._outermost = _outermost_frame()
        if hasattr(sys.exit, LISTENERS):
            getattr(sys.exit, LISTENERS).append(self._hear)
        else:
            sys.exit = self._listening(sys.exit, has_self=False)
        quitter = type(getattr(builtins, "exit", None))
        if quitter.__name__ == "Quitter":  # of the module site, which may be off
            quitter.__call__ = self._listening(quitter.__call__, has_self=True)  # type: ignore[method-assign] # the class is Python's own

    def exception(self, kind: type[BaseException]) -> None:
        """An exception that nobody caught is being shown."""
        self._shown = INTERRUPTED if issubclass(kind, KeyboardInterrupt) else FAILED

    def status(self) -> int:
        """The status, 0 to 255; `UNKNOWN` where it cannot be told. For use at exit."""
        try:
            if _has_returned(self._outermost):
                return 0
            if self._shown is not None:
                return self._shown
            if self._asked is not None and self._asked[1] == self._progress():
                return self._asked[0]
        except Exception:  # the probe's border: a way out must not be barred
            return UNKNOWN
        return UNKNOWN

    def _listening(self, leave: Callable[..., Any], has_self: bool) -> Any:
        @functools.wraps(leave)
        def listening(*args: Any, **kwargs: Any) -> Any:
            given = args[1:] if has_self else args
            self._hear(given[0] if given else kwargs.get("code"))
            return leave(*args, **kwargs)

        return listening

    def _hear(self, asked: object) -> None:
        if threading.current_thread() is threading.main_thread():  # else only a thread ends
            self._asked = (exit_status(asked), self._progress())


def exit_status(asked: object) -> int:
    """The status of a process that calls `sys.exit(asked)`.

    >>> exit_status(None), exit_status(3), exit_status(-1), exit_status("bad")
    (0, 3, 255, 1)
    """
    if asked is None:
        return 0
    return asked & 0xFF if isinstance(asked, int) else FAILED


def _outermost_frame() -> FrameType | None:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _has_returned(frame: FrameType | None) -> bool:
    """Whether a frame that is over ended with a return, and not by an exception."""
    if frame is None or frame.f_lasti < 0:
        return False
    return opname[frame.f_code.co_code[frame.f_lasti]].startswith("RETURN_")
