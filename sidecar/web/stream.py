"""Server-sent events: every new snapshot to every open page.

Bounded by `StreamLimits`: the first client too many gets 503, snapshots in between are skipped, a
client that does not read is cut off. A snapshot is encoded once and shared by all clients.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ntp_core.inbound.plain_json import to_json
from sidecar.web.guard import json_response

Address = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamLimits:
    """Bounds of the event streams.

    Attributes:
        max_clients: open streams; the next one gets 503.
        interval_s: shortest time between two snapshots of a stream.
        send_timeout_s: a client that takes nothing for so long is cut off.
        heartbeat_s: without a new snapshot a comment goes out this often, to find dead clients.
    """

    max_clients: int = 32
    interval_s: float = 0.5
    send_timeout_s: float = 10.0
    heartbeat_s: float = 5.0


STREAM_LIMITS = StreamLimits()


class SnapshotSource(Protocol):
    """Where the web gets what it shows. Called from the server's threads: answer from what was
    published last, and do not wait for the next tick."""

    def snapshot(self) -> dict[str, Any]:
        """Keys job, ranks, plan, changes, incidents, checks, as in docs/api.md."""

    def health(self) -> tuple[bool, str]:
        """Whether the sidecar itself works, and why not."""

    def ready(self) -> tuple[bool, str]:
        """Whether it has something to watch, and what it waits for."""

    def version(self) -> int:
        """Grows with each tick."""


class SnapshotStream:
    """All open event streams of one server."""

    def __init__(self, source: SnapshotSource, limits: StreamLimits) -> None:
        self.limits = limits
        self.stopping = threading.Event()
        self.clients = 0
        self.drop: Callable[[Address], None] | None = None  # set by the server
        self._source = source
        self._encoded: tuple[int, bytes] = (-1, b"")

    def open(self, method: str = "GET") -> Response:
        """One more stream, or 503 when there are enough. HEAD gets the headers, and no place."""
        if method == "HEAD":
            return Response(media_type=_EventStream.media_type)
        most = self.limits.max_clients
        if self.clients >= most:
            text = f"{most} pages follow this sidecar already; close one or poll /api/v1"
            return json_response({"error": text}, 503, {"retry-after": "10"})
        return _EventStream(self)

    def event(self, seen: int) -> tuple[int, bytes] | None:
        """The newest snapshot as an event, with its version; None if `seen` is the newest."""
        version = self._source.version()
        if version == seen:
            return None
        if version != self._encoded[0]:
            body = to_json(self._source.snapshot())
            self._encoded = version, f"id: {version}\nevent: snapshot\ndata: {body}\n\n".encode()
        return self._encoded


class _EventStream(Response):
    """One client."""

    media_type = "text/event-stream"

    def __init__(self, stream: SnapshotStream) -> None:
        super().__init__()
        del self.headers["content-length"]
        self._stream = stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._stream.clients += 1
        gone = asyncio.ensure_future(_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._follow(gone, send)
        except TimeoutError:
            if self._stream.drop is not None and scope.get("client"):
                self._stream.drop(tuple(scope["client"]))
                await asyncio.wait({gone}, timeout=1)
        finally:
            gone.cancel()
            self._stream.clients -= 1

    async def _follow(self, gone: asyncio.Future[None], send: Send) -> None:
        limits, loop = self._stream.limits, asyncio.get_running_loop()

        async def send_in_time(body: bytes, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": body, "more_body": more}
            await asyncio.wait_for(send(message), limits.send_timeout_s)

        await send_in_time(b"retry: 2000\n\n")
        seen, sent_s = -1, loop.time()
        while not (gone.done() or self._stream.stopping.is_set()):
            event = self._stream.event(seen)
            if event is not None:
                seen, body = event
                await send_in_time(body)
                sent_s = loop.time()
            elif loop.time() - sent_s > limits.heartbeat_s:
                await send_in_time(b": nothing new\n\n")
                sent_s = loop.time()
            await asyncio.wait({gone}, timeout=limits.interval_s)
        await send_in_time(b"", more=False)


async def _disconnect(receive: Receive) -> None:
    """Return when the client is gone."""
    while (await receive())["type"] != "http.disconnect":
        pass
