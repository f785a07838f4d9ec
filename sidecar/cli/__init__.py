"""The command `ntp-sidecar`: a door that is light, so that Ctrl-C is heard at once.

Loading the commands takes about a second. Nothing has begun then, so Ctrl-C just ends the process;
what interrupts a command ends in exit code 130 and no traceback.
"""

from __future__ import annotations

import importlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    is_demo = args[:1] == ["demo"]
    name = "sidecar.demo.command" if is_demo else "sidecar.cli.commands"
    with _interrupts_end_at_once():
        command = importlib.import_module(name)
    try:
        code: int = command.main(args[1:] if is_demo else args)
    except KeyboardInterrupt:
        return INTERRUPTED
    return code


@contextmanager
def _interrupts_end_at_once() -> Iterator[None]:
    """Without a handler: one that raises leaves tracebacks in the middle of an import."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
