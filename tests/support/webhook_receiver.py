"""A webhook receiver that answers by a script: statuses, Retry-After, redirects, silence."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

from sidecar.notify.receiver import Received, Reply, WebhookReceiver

HANG = Reply(status=0)
"""Never answer, until the receiver is closed."""


class ScriptedReceiver(WebhookReceiver):
    """Answers the script's replies in order, then 200 to right signatures and 401 to wrong ones."""

    def __init__(self, secret: str | None, script: Iterable[Reply | int] = ()) -> None:
        super().__init__(secret, reply=self._next)
        self._script = deque(Reply(status=s) if isinstance(s, int) else s for s in script)
        self._closing = threading.Event()

    def _next(self, received: Received) -> Reply:
        reply = self._script.popleft() if self._script else None
        if reply is HANG:
            self._closing.wait(60)
            return Reply(status=503)
        return reply or Reply(status=401 if received.error else 200)

    def stop(self) -> None:
        self._closing.set()
        super().stop()

    @property
    def ids(self) -> list[str]:
        """Ids of all requests, in order."""
        return [r.id for r in self.received]
