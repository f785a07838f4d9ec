"""Signals that ask a launcher to end, as a wish that it looks at."""

from __future__ import annotations

import signal


class ExitSignals:
    """SIGINT, SIGTERM and SIGHUP as a wish that a program looks at. For its main function only.

    A handler that raised could be swallowed by whatever it interrupts, a finalizer or a hook of
    fork, and could interrupt the end of the ranks. What is ignored from the start stays so (nohup).

    Attributes:
        number: the signal that came first; None before.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._note)

    def leave(self) -> None:
        """Raise SystemExit(128 + n) when signal n has come."""
        if self.number is not None:
            raise SystemExit(128 + self.number)

    def _note(self, number: int, _frame: object) -> None:
        self.number = self.number or number
