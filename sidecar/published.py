"""What the web shows, made when it is asked for and not older than a few ticks.

Server threads ask; the tick thread changes the state. A short lock keeps them apart: it is held
while a view is built, never while something waits. If the tick thread is stuck, readers get what
was built last, and the health check says since when.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

KEEP_S = 0.2
"""A view at most this old is given out again."""
LOCK_WAIT_S = 2.0
STALE_S = 5.0
"""Without a tick for this long the sidecar is not healthy."""


class Published:
    """Cached views of the daemon's state; satisfies `sidecar.web.stream.SnapshotSource`.

    Args:
        lock: held by the tick while it changes the state.
        build: the snapshot of docs/api.md; called under the lock.
        watching: whether there is something to watch, and what is missing.
    """

    def __init__(
        self,
        lock: threading.Lock,
        build: Callable[[], dict[str, Any]],
        watching: Callable[[], tuple[bool, str]],
    ) -> None:
        self._lock = lock
        self._build = build
        self._watching = watching
        self._snapshot: dict[str, Any] = {}
        self._built_s = float("-inf")
        self._version = 0
        self._tick_s: float | None = None

    def ticked(self, is_new: bool) -> None:
        """A tick has ended. `is_new`: something changed that a reader would see."""
        self._tick_s = time.monotonic()
        self._version += is_new

    def snapshot(self) -> dict[str, Any]:
        """Keys job, ranks, plan, changes, incidents, checks."""
        if time.monotonic() - self._built_s < KEEP_S and self._snapshot:
            return self._snapshot
        if self._lock.acquire(timeout=LOCK_WAIT_S):
            try:
                self._snapshot = self._build()
                self._built_s = time.monotonic()
            finally:
                self._lock.release()
        return self._snapshot

    def health(self) -> tuple[bool, str]:
        """Whether ticks go on."""
        if self._tick_s is None:
            return False, "no tick yet"
        age_s = time.monotonic() - self._tick_s
        if age_s > STALE_S:
            return False, f"no tick for {age_s:.1f} s"
        return True, "ticking"

    def ready(self) -> tuple[bool, str]:
        """Whether there is a job to watch."""
        is_healthy, reason = self.health()
        return self._watching() if is_healthy else (False, reason)

    def version(self) -> int:
        """Grows with each tick that changed something."""
        return self._version
