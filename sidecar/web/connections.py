"""Connections with bounds: how many, how long one may wait for a request, how long for a reader.

uvicorn limits the idle time after an answer only. A client that sends half a request, or that does
not read its answer, would hold its place for ever; enough of them would lock everyone out. So each
wait has a limit, and when all places are taken, the connection that has waited longest without a
request makes room: `/healthz` and `/metrics` go on answering.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionLimits:
    """Bounds of the connections of one server.

    Attributes:
        max_connections: beyond it the one that waits longest is cut, if any waits.
        max_busy: beyond it, when that many are being answered at once, 503.
        request_timeout_s: from the start of a connection, or from an answer, until the headers of
            the next request are there.
        write_timeout_s: longest time in which a client takes nothing of its answer.
    """

    max_connections: int = 128
    max_busy: int = 256
    request_timeout_s: float = 10.0
    write_timeout_s: float = 20.0


class BoundedConfig(uvicorn.Config):
    """uvicorn's settings with our limits."""

    def __init__(self, app: Any, limits: ConnectionLimits, **settings: Any) -> None:
        super().__init__(app, http=BoundedProtocol, limit_concurrency=limits.max_busy, **settings)
        self.limits = limits


class BoundedProtocol(H11Protocol):
    """One connection. All of it runs in the server's event loop."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, BoundedConfig)
        self.limits = config.limits
        self.waits_since_s = 0.0
        self._waiting: asyncio.TimerHandle | None = None
        self._writing: asyncio.TimerHandle | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client is there: wait for its request, and make room if it is one too many."""
        super().connection_made(transport)
        self._begin_wait()
        self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone: no limit is left to watch."""
        self._end_wait()
        self._end_write()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Bytes have come; once they make a request, its wait is over."""
        super().handle_events()
        if not self.is_waiting:
            self._end_wait()

    def on_response_complete(self) -> None:
        """An answer is out: wait for the next request."""
        self._begin_wait()  # first: the next request may be there already
        super().on_response_complete()

    def pause_writing(self) -> None:
        """The client takes no more of its answer: it has `write_timeout_s` from now."""
        super().pause_writing()
        if self._writing is None:
            limit_s = self.limits.write_timeout_s
            self._writing = self.loop.call_later(limit_s, self.transport.abort)

    def resume_writing(self) -> None:
        """It takes more again."""
        self._end_write()
        super().resume_writing()

    def _begin_wait(self) -> None:
        self._end_wait()
        self.waits_since_s = self.loop.time()
        limit_s = self.limits.request_timeout_s
        self._waiting = self.loop.call_later(limit_s, self.transport.abort)

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _end_write(self) -> None:
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None

    def _make_room(self) -> None:
        others = [c for c in self.connections if isinstance(c, BoundedProtocol) and c is not self]
        idle = sorted((c for c in others if c.is_waiting), key=lambda c: c.waits_since_s)
        excess = len(self.connections) - self.limits.max_connections
        for connection in idle[: max(0, excess)]:
            self.connections.discard(connection)  # now: its end is only told in the next round
            connection.transport.abort()
