"""Intake: hands messages from the tick to the outbox without ever waiting for a disk.

The tick puts a message into a bounded queue in memory; a thread keeps it in the outbox and takes it
out of the queue only when that has succeeded. While the outbox cannot be written (disk full, file
locked) messages wait in the queue, in order.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

log = logging.getLogger(__name__)

MAX_WAITING = 1000
"""Messages in memory, at most 20 kB each. Beyond it the oldest goes and is counted: a newer
incident matters more."""
RETRY_S = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Handed:
    """One message on its way."""

    id: str
    body: bytes


class Intake:
    """The queue before one outbox.

    Args:
        keep: puts a message into the outbox and says whether it is new there.
        retry_s: wait after a failure.
        max_waiting: see `MAX_WAITING`.
    """

    def __init__(
        self,
        keep: Callable[[str, bytes], bool],
        *,
        retry_s: float = RETRY_S,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self._keep = keep
        self._retry_s = retry_s
        self._max_waiting = max_waiting
        self._changed = threading.Condition()
        self._waiting: deque[_Handed] = deque()
        self._kept = self._dropped = 0
        self._stopping = self._failing = False
        self._thread = threading.Thread(target=self._run, name="webhook-intake", daemon=True)

    def start(self) -> None:
        """Begin to keep what is handed over."""
        self._thread.start()

    def hand(self, message_id: str, body: bytes) -> None:
        """Hand a message over. Never waits for anything but another short call of this object."""
        with self._changed:
            if len(self._waiting) >= self._max_waiting:
                self._waiting.popleft()
                self._dropped += 1
            self._waiting.append(_Handed(id=message_id, body=body))
            self._changed.notify_all()

    @property
    def sent(self) -> int:
        """Messages that were new to the outbox, and those that still wait for it."""
        with self._changed:
            return self._kept + len(self._waiting)

    @property
    def waiting(self) -> int:
        """Messages in memory."""
        return len(self._waiting)

    @property
    def dropped(self) -> int:
        """Messages lost: over the bound of the queue, or to an outbox that failed to the end."""
        return self._dropped

    def stop(self, timeout_s: float = 2.0) -> bool:
        """Stop when all is kept, or after `timeout_s`. False when something could not be kept."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        with self._changed:
            lost = len(self._waiting)
            self._waiting.clear()
            self._dropped += lost
        if lost:
            log.error("webhooks: %d messages could not be kept and are lost", lost)
        return not lost

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._stopping)
                if not self._waiting:
                    return
                handed = self._waiting[0]
            if self._try(handed):
                with self._changed:
                    if self._waiting and self._waiting[0] is handed:
                        self._waiting.popleft()
                continue
            with self._changed:
                # The end is not waited for in full: one more try soon, then `stop` gives up.
                self._changed.wait(self._retry_s)

    def _try(self, handed: _Handed) -> bool:
        try:
            is_new = self._keep(handed.id, handed.body)
        except (sqlite3.Error, OSError) as error:
            if not self._failing:  # once for an outage
                log.warning("webhook outbox: %s; messages wait in memory", error)
            self._failing = True
            return False
        self._failing = False
        self._kept += is_new
        return True
