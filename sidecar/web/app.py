"""The HTTP application: page, JSON API, event stream, metrics, health.

It only reads: no request changes anything. Metrics and the report come in as callables, because
`web` knows neither the exporter nor the daemon.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from sidecar.catalog import CHECKS
from sidecar.web.guard import Guard, json_response
from sidecar.web.openapi import openapi_document
from sidecar.web.stream import STREAM_LIMITS, SnapshotSource, SnapshotStream, StreamLimits

STATIC = Path(__file__).parent / "static"
RUNBOOKS = Path(__file__).parent / "runbooks"  # alerts/runbooks
RUNBOOK_NAMES = frozenset(f"{c.alert}.md" for c in CHECKS)
"""Those that an incident names; nothing else is served from there."""
LISTS = ("ranks", "changes", "incidents", "checks")

Metrics = Callable[[str | None], tuple[bytes, str]]


def create_app(
    source: SnapshotSource,
    *,
    token: str | None,
    metrics: Metrics,
    report: Callable[[], dict[str, Any]],
    limits: StreamLimits = STREAM_LIMITS,
) -> Starlette:
    """The application. `app.state.stream` holds its open event streams.

    Args:
        source: what to show.
        token: asked from every caller; None answers to loopback names only.
        metrics: Accept header -> (body, content type) of `/metrics`.
        report: body of `/api/v1/report`.
        limits: bounds of the event streams.
    """
    stream = SnapshotStream(source, limits)

    async def open_stream(request: Request) -> Response:
        return stream.open(request.method)

    def show_metrics(request: Request) -> Response:
        body, content_type = metrics(request.headers.get("accept"))
        return Response(body, headers={"content-type": content_type})

    app = Starlette(
        routes=[
            Route("/", _page),
            Mount("/static", StaticFiles(directory=STATIC)),
            Route("/runbooks/{name}", _runbook),
            Route("/metrics", show_metrics),
            _probe("/healthz", source.health),
            _probe("/readyz", source.ready),
            _json("/api/v1/job", lambda: source.snapshot()["job"]),
            _json("/api/v1/plan", lambda: source.snapshot()["plan"]),
            *(_list(source, name) for name in LISTS),
            _json("/api/v1/report", report),
            _json("/api/v1/openapi.json", openapi_document),
            Route("/api/v1/stream", open_stream),
        ],
        middleware=[Middleware(Guard, token=token)],
        exception_handlers={HTTPException: _http_error},
    )
    app.state.stream = stream
    return app


def _page(_: Request) -> Response:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-store"})


def _runbook(request: Request) -> Response:
    """What to do about an incident, as plain text: Markdown reads well as it is."""
    name = request.path_params["name"]
    path = RUNBOOKS / name
    if name not in RUNBOOK_NAMES or not path.is_file():
        raise HTTPException(404, f"no runbook '{name}' here; see alerts/runbooks of the project")
    return FileResponse(path, media_type="text/plain; charset=utf-8")


# Plain functions, not coroutines: they run in threads, so a slow one does not hold up the streams.


def _json(path: str, body: Callable[[], Any]) -> BaseRoute:
    def answer(_: Request) -> Response:
        return json_response(body())

    return Route(path, answer)


def _list(source: SnapshotSource, name: str) -> BaseRoute:
    return _json(f"/api/v1/{name}", lambda: {name: source.snapshot()[name]})


def _probe(path: str, ask: Callable[[], tuple[bool, str]]) -> BaseRoute:
    def answer(_: Request) -> Response:
        good, reason = ask()
        body = {"status": "ok" if good else "unavailable", "reason": reason}
        return json_response(body, 200 if good else 503)

    return Route(path, answer)


def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return json_response({"error": error.detail}, error.status_code, error.headers)
