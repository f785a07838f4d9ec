"""A small webhook receiver: verifies signatures and keeps the newest messages.

For the demo and for trying out a configuration; the tests use it too. Bounds: `MAX_KEPT` messages,
`MAX_BODY_BYTES` a body, `READ_TIMEOUT_S` for a request.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType

from standardwebhooks import Webhook, WebhookVerificationError

MAX_KEPT = 256
MAX_BODY_BYTES = 256 * 1024
READ_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """One request. `error` says why its signature was refused; empty when it was right."""

    id: str
    body: bytes
    headers: Mapping[str, str]
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What to answer."""

    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


class WebhookReceiver:
    """An HTTP server in a thread. Use it as a context manager, or `start` and `stop` it.

    Args:
        secret: `whsec_...`; None takes every message without a look at its signature.
        port: 0 takes a free one.
        reply: answer to a message, called in the server's thread; None answers 200, and 401 to a
            wrong signature.
    """

    def __init__(
        self,
        secret: str | None,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        reply: Callable[[Received], Reply] | None = None,
    ) -> None:
        self._webhook = None if secret is None else Webhook(secret)
        self._reply = reply
        self._kept: deque[Received] = deque(maxlen=MAX_KEPT)
        self._changed = threading.Condition()
        self._server = _server(host, port, self._take)
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="webhook-receiver", daemon=True
        )

    @property
    def url(self) -> str:
        """Where to send webhooks."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}/webhook"

    @property
    def received(self) -> list[Received]:
        """The newest requests, oldest first, also those whose signature was wrong."""
        with self._changed:
            return list(self._kept)

    def start(self) -> None:
        """Start answering."""
        self._thread.start()

    def stop(self) -> None:
        """Stop answering and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> WebhookReceiver:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def wait_for(
        self, condition: Callable[[list[Received]], bool], timeout_s: float
    ) -> list[Received]:
        """Wait until the requests meet a condition.

        Raises:
            TimeoutError: naming what has arrived instead.
        """
        with self._changed:
            met = self._changed.wait_for(lambda: condition(list(self._kept)), timeout_s)
            kept = list(self._kept)
        if not met:
            ids = [r.id for r in kept]
            raise TimeoutError(f"not met in {timeout_s} s; received {len(ids)}: {ids[-8:]}")
        return kept

    def _take(self, headers: Mapping[str, str], body: bytes) -> Reply:
        lower = {name.lower(): value for name, value in headers.items()}
        received = Received(
            id=lower.get("webhook-id", ""),
            body=body,
            headers=lower,
            error=self._verify(lower, body),
        )
        with self._changed:
            self._kept.append(received)
            self._changed.notify_all()
        if self._reply is not None:
            return self._reply(received)
        return Reply(status=401 if received.error else 200)

    def _verify(self, headers: Mapping[str, str], body: bytes) -> str:
        if self._webhook is None:
            return ""
        try:
            self._webhook.verify(body, dict(headers), json_parse=False)
        except (WebhookVerificationError, ValueError) as error:  # ValueError: not text, not base64
            return str(error) or type(error).__name__
        return ""


def _server(
    host: str, port: int, take: Callable[[Mapping[str, str], bytes], Reply]
) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = READ_TIMEOUT_S
        server_version = "ntp-sidecar-receiver"

        def do_POST(self) -> None:
            size = self.headers.get("content-length", "")
            if not size.isdigit():
                self._answer(Reply(status=411))
            elif int(size) > MAX_BODY_BYTES:
                self._answer(Reply(status=413))
            else:
                self._answer(take(dict(self.headers.items()), self.rfile.read(int(size))))

        def _answer(self, reply: Reply) -> None:
            self.send_response(reply.status)
            for name, value in reply.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Keep quiet."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    return server
