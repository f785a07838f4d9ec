"""Prints the alerts that Alertmanager sends, one line each: the receiver of docker-compose.yml.

It shows that the chain works and holds the token check and the answer codes a real receiver needs;
it keeps nothing. Only the standard library, so that it runs in any Python image.
"""

from __future__ import annotations

import argparse
import hmac
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MAX_BODY_BYTES = 1_000_000
"""A larger body is refused: Alertmanager's `max_alerts` keeps its own far below."""


class AlertLog(ThreadingHTTPServer):
    """HTTP server that accepts Alertmanager's webhook (version 4) under a bearer token."""

    daemon_threads = True

    def __init__(self, address: tuple[str, int], token: str) -> None:
        """Listen on `address`; port 0 takes a free one. An empty token is refused."""
        if not token:
            raise ValueError("the token file is empty; write a token into it")
        self.token = token
        super().__init__(address, _Handler)


class _Handler(BaseHTTPRequestHandler):
    server: AlertLog

    def do_GET(self) -> None:
        self._answer(200 if self.path == "/healthz" else 404)

    def do_POST(self) -> None:
        given = self.headers.get("Authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {self.server.token}".encode()):
            self._answer(401)
            return
        length = int(self.headers.get("Content-Length", 0))
        if length > MAX_BODY_BYTES:
            self._answer(413)
            return
        try:
            body = json.loads(self.rfile.read(length))
            lines = [line_of(self.path, alert) for alert in body["alerts"]]
        except (ValueError, KeyError, TypeError, AttributeError):
            self._answer(400)  # final for Alertmanager: the same body would fail again
            return
        _say("\n".join(lines))
        self._answer(200)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing per request; the alerts are the log."""

    def _answer(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def line_of(path: str, alert: dict[str, Any]) -> str:
    """One alert as one line of JSON. Fields that newer Alertmanagers add are ignored."""
    labels, annotations = dict(alert["labels"]), alert.get("annotations", {})
    return json.dumps(
        {
            "receiver": path.strip("/"),
            "status": alert["status"],
            "alert": labels.pop("alertname", None),
            "labels": labels,
            "description": annotations.get("description"),
            "runbook": annotations.get("runbook_url"),
            "starts_at": alert.get("startsAt"),
        }
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9095)
    parser.add_argument("--token-file", type=Path, required=True)
    args = parser.parse_args()
    server = AlertLog((args.host, args.port), args.token_file.read_text().strip())
    _say(json.dumps({"listening": server.server_address[1]}))
    server.serve_forever()


if __name__ == "__main__":
    main()
