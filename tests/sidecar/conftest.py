"""Fixtures of the sidecar's tests."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

Render = Callable[[str | None], tuple[bytes, str]]


@pytest.fixture
def metrics_server() -> Iterator[Callable[[Render], str]]:
    """Serves a render function over HTTP; gives the host and port to scrape."""
    servers: list[tuple[ThreadingHTTPServer, threading.Thread]] = []

    def serve(render: Render) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                body, content_type = render(self.headers.get("accept"))
                self.send_response(200)
                self.send_header("content-type", content_type)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Keep quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        servers.append((server, thread))
        return f"127.0.0.1:{server.server_address[1]}"

    yield serve
    for server, thread in servers:
        server.shutdown()
        server.server_close()
        thread.join()
