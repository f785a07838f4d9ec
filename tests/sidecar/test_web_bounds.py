"""The web against clients that are slow, many or hostile, and against numbers that JSON lacks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from sidecar.view import snapshot_view
from sidecar.web.app import LISTS, create_app
from sidecar.web.connections import ConnectionLimits
from sidecar.web.guard import MAX_QUERY_FIELDS, Guard
from sidecar.web.server import WebServer
from sidecar.web.stream import StreamLimits
from tests.support.sample_state import NOW_NS, UNIX_OFFSET_NS, sample_incidents, sample_job
from tests.support.web_source import REPORT, FixedSource, fixed_metrics, serving

TOKEN = "s3cret-token"
WAIT_S = 20.0
HALF = b"GET /api/v1/job HTTP/1.1\r\nHost: 127"
WHOLE = b"GET /api/v1/job HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Return when the condition holds; fail after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.005)


@contextlib.contextmanager
def limited(source: FixedSource, limits: ConnectionLimits) -> Iterator[WebServer]:
    """A server with limits of its own."""
    app = create_app(source, token=None, metrics=fixed_metrics, report=lambda: REPORT)
    server = WebServer(app, token=None, port=0, limits=limits)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def clients(server: WebServer, count: int, start: bytes) -> Iterator[list[socket.socket]]:
    """Connections that each send the same and then stay silent."""
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            with contextlib.suppress(ConnectionError):  # it may be cut already
                sock.sendall(start)
            opened.append(sock)
        yield opened


def is_cut(sock: socket.socket) -> bool:
    """Whether the server has ended the connection, after whatever it had answered."""
    sock.setblocking(False)
    try:
        while sock.recv(65536):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def answers(server: WebServer) -> list[int]:
    """Status of what machines ask for."""
    return [httpx.get(server.url + p).status_code for p in ("/healthz", "/metrics", "/api/v1/job")]


# slow clients


@pytest.mark.parametrize(
    "start", [b"", HALF, WHOLE, WHOLE + HALF], ids=["silent", "half", "idle", "2"]
)
def test_many_silent_connections_do_not_lock_others_out(start: bytes) -> None:
    """With more of them than there are places, the one that waits longest makes room."""
    with serving(FixedSource()) as server, clients(server, 150, start) as slow:
        assert answers(server) == [200, 200, 200]
        assert sum(not is_cut(s) for s in slow) <= ConnectionLimits().max_connections


def test_connection_without_a_whole_request_is_cut_in_time() -> None:
    """At the start, after an answer, and however slowly the bytes come."""
    limits = ConnectionLimits(request_timeout_s=0.3)
    with limited(FixedSource(), limits) as server, contextlib.ExitStack() as stack:
        for start in (b"", HALF, WHOLE + HALF):
            (sock,) = stack.enter_context(clients(server, 1, start))
            wait_for(lambda s=sock: is_cut(s), f"the end of {start!r}")  # type: ignore[misc]
        (drip,) = stack.enter_context(clients(server, 1, HALF))

        def is_over() -> bool:
            with contextlib.suppress(ConnectionError):
                drip.send(b"1")
            return is_cut(drip)

        wait_for(is_over, "the end of a request that comes byte by byte")


def test_client_that_does_not_read_its_answer_is_cut() -> None:
    """An answer that nobody takes does not hold its place for ever."""
    big = FixedSource()
    big.state[1]["incidents"] *= 3000
    limits = ConnectionLimits(write_timeout_s=0.2, request_timeout_s=30)
    ask = b"GET /api/v1/incidents HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    with limited(big, limits) as server, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", server.port))
        stalled.sendall(ask)
        connections = server._server.server_state.connections
        wait_for(lambda: len(connections) == 1, "the connection")
        wait_for(lambda: not connections, "the end of the stalled reader")


def test_open_streams_are_not_cut_to_make_room() -> None:
    """A page that follows is no idle connection."""
    with (
        serving(FixedSource()) as server,
        httpx.stream("GET", f"{server.url}/api/v1/stream") as page,
        clients(server, 150, HALF),
    ):
        assert answers(server) == [200, 200, 200]
        assert server.stream.clients == 1
        assert next(page.iter_lines()) == "retry: 2000"


def test_head_of_the_stream_ends_at_once_and_takes_no_place() -> None:
    """Headers as GET gives them, no body, and every place stays free."""
    limits = StreamLimits(max_clients=1, interval_s=0.02)
    with serving(FixedSource(), limits=limits) as server:
        url = f"{server.url}/api/v1/stream"
        with httpx.stream("GET", url):
            answer = httpx.head(url)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        wait_for(lambda: server.stream.clients == 0, "the place")


# numbers


def snapshot_of_nothing_finite() -> dict[str, Any]:
    """The sample with NaN and infinity wherever a number may be a float, and broken text."""
    job, incidents = sample_job(), sample_incidents()
    for rank, odd in zip(job.ranks.values(), (math.nan, math.inf, -math.inf) * 2, strict=False):
        rank.loss = rank.grad_norm = rank.work = odd
        for sample in rank.steps:
            sample.loss = sample.work = odd
    job.loss_first = math.nan
    for change in job.changes:
        change.step_time_before_s = change.step_time_after_s = change.step_time_ideal_s = math.nan
        change.incident = "\ud800"
    return snapshot_view(job, incidents, [], now_ns=NOW_NS, unix_offset_ns=UNIX_OFFSET_NS)


@pytest.mark.parametrize("path", ["job", "plan", *LISTS, "report"])
def test_answers_with_numbers_that_are_not_finite_are_json(path: str) -> None:
    """Null takes their place in every answer."""
    source = FixedSource(snapshot_of_nothing_finite())
    odd = {"loss": {"first": math.nan, "last": [math.inf, {"x": -math.inf}]}}
    app = create_app(source, token=None, metrics=fixed_metrics, report=lambda: odd)
    server = WebServer(app, token=None, port=0)
    server.start()
    try:
        answer = httpx.get(f"{server.url}/api/v1/{path}")
    finally:
        server.stop()
    assert answer.status_code == 200
    body = json.loads(answer.text, parse_constant=lambda word: pytest.fail(word))
    if path == "report":
        assert body == {"loss": {"first": None, "last": [None, {"x": None}]}}


# the guard


def ask(guard: Guard, path: str, query: bytes, headers: list[tuple[bytes, bytes]]) -> int:
    """Status of the guard's answer, without a server around it."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": query,
        "headers": headers,
    }
    asyncio.run(guard(scope, receive, send))
    status: int = sent[0]["status"]
    return status


@pytest.mark.parametrize(
    "query", [b"&".join([b"a=1"] * (MAX_QUERY_FIELDS + 1)), b";" * 99, b"%", b"token=%ff%00"]
)
def test_odd_query_without_token_is_refused_and_no_error(query: bytes) -> None:
    """However many fields it has."""
    guard = Guard(PlainTextResponse("secret"), TOKEN)
    assert ask(guard, "/", query, [(b"host", b"x")]) == 401
    right = (b"authorization", b"Bearer " + TOKEN.encode())
    assert ask(guard, "/", query, [right]) == 200


@settings(deadline=None, max_examples=150)
@given(
    token=st.sampled_from([None, TOKEN, "t\u00f6ken", "\udcff"]),
    path=st.text(),
    query=st.one_of(
        st.binary(), st.lists(st.sampled_from([b"token=", b"&", b"=", b";"])).map(b"".join)
    ),
    headers=st.lists(
        st.tuples(
            st.sampled_from([b"host", b"authorization", b"cookie"]),
            st.one_of(st.binary(), st.binary().map(lambda b: b"Bearer " + b)),
        )
    ),
)
def test_guard_refuses_or_passes_whatever_is_asked(
    token: str | None, path: str, query: bytes, headers: list[tuple[bytes, bytes]]
) -> None:
    """No request makes it fail, and none that lacks the token gets in."""
    status = ask(Guard(PlainTextResponse("secret"), token), path, query, headers)
    assert status in ((200, 421) if token is None else (200, 401))
    if status == 200 and token == TOKEN and path not in ("/healthz", "/readyz"):
        said = query + b"".join(v for _, v in headers)
        assert TOKEN.encode() in said or path.startswith("/static/")
