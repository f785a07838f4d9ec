"""The web over real sockets: API, schemas, stream, access, start and stop."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate

from sidecar.catalog import CHECKS
from sidecar.ingest.state import JobState
from sidecar.view import snapshot_view
from sidecar.web.app import create_app
from sidecar.web.openapi import SCHEMAS, openapi_document
from sidecar.web.server import ServeError, WebServer
from sidecar.web.stream import StreamLimits
from tests.support.sample_state import sample_snapshot
from tests.support.web_source import METRICS_TYPE, REPORT, FixedSource, fixed_metrics, serving

TOKEN = "s3cret-token"
WAIT_S = 20.0


@pytest.fixture
def source() -> FixedSource:
    """The sample state."""
    return FixedSource()


@pytest.fixture
def server(source: FixedSource) -> Iterator[WebServer]:
    """A server without token."""
    with serving(source) as running:
        yield running


def empty_snapshot() -> dict[str, Any]:
    """Before any rank is seen."""
    return snapshot_view(JobState(job_id="j"), [], [], now_ns=1, unix_offset_ns=0)


def schema_of(name: str) -> dict[str, Any]:
    """A component with all others within reach of its references."""
    return {"$ref": f"#/components/schemas/{name}", "components": {"schemas": SCHEMAS}}


def read_events(lines: Iterator[str], count: int) -> list[tuple[int, dict[str, Any]]]:
    """The next `count` snapshots of a stream, with their ids."""
    events: list[tuple[int, dict[str, Any]]] = []
    version = 0
    for line in lines:
        if line.startswith("id: "):
            version = int(line[4:])
        if line.startswith("data: "):
            events.append((version, json.loads(line[6:])))
            if len(events) == count:
                break
    return events


def wait_for(condition: Any, what: str) -> None:
    """Return when the condition holds; fail after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {WAIT_S} s for {what}"
        time.sleep(0.005)


# answers and schemas


def test_openapi_document_is_valid_and_complete(server: WebServer) -> None:
    """The document is valid OpenAPI, and every path in it is answered."""
    document = httpx.get(f"{server.url}/api/v1/openapi.json").json()
    validate(document)
    assert document == openapi_document()
    for path in document["paths"]:
        if path != "/api/v1/stream":
            assert httpx.get(server.url + path).status_code == 200, path


@pytest.mark.parametrize("empty", [False, True])
def test_answers_match_their_schemas(source: FixedSource, server: WebServer, empty: bool) -> None:
    """Real answers, full and empty, match the closed schemas."""
    if empty:
        source.publish(empty_snapshot())
    for path, item in openapi_document()["paths"].items():
        schema = item["get"]["responses"]["200"]["content"].get("application/json")
        if schema is None:
            continue
        name = schema["schema"]["$ref"].rsplit("/", 1)[1]
        answer = httpx.get(server.url + path)
        assert answer.headers["content-type"] == "application/json"
        jsonschema.validate(answer.json(), schema_of(name), jsonschema.Draft202012Validator)


def test_schema_refuses_an_unknown_key() -> None:
    """The schemas are closed, so that the test above can fail."""
    job = {**empty_snapshot()["job"], "stray": 1}
    with pytest.raises(jsonschema.ValidationError, match="stray"):
        jsonschema.validate(job, schema_of("Job"), jsonschema.Draft202012Validator)


def test_api_shows_the_sample(server: WebServer) -> None:
    """Envelopes are those of docs/api.md."""
    sample = sample_snapshot()
    assert httpx.get(f"{server.url}/api/v1/job").json() == sample["job"]
    assert httpx.get(f"{server.url}/api/v1/plan").json() == sample["plan"]
    for name in ("ranks", "changes", "incidents", "checks"):
        assert httpx.get(f"{server.url}/api/v1/{name}").json() == {name: sample[name]}
    assert httpx.get(f"{server.url}/api/v1/report").json() == REPORT


def test_metrics_negotiates_and_keeps_the_content_type(server: WebServer) -> None:
    """The exporter sees the Accept header; its content type arrives as it is."""
    answer = httpx.get(f"{server.url}/metrics", headers={"accept": "application/openmetrics-text"})
    assert answer.text == "# application/openmetrics-text\n"
    assert answer.headers["content-type"] == METRICS_TYPE


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_probes_answer_200_or_503_with_reason(
    source: FixedSource, server: WebServer, path: str
) -> None:
    """Good is 200; not good is 503 and says why."""
    assert httpx.get(server.url + path).json() == {"status": "ok", "reason": ""}
    source.health_answer = source.ready_answer = (False, "no tick for 12 s")
    answer = httpx.get(server.url + path)
    assert answer.status_code == 503
    assert answer.json() == {"status": "unavailable", "reason": "no tick for 12 s"}


def test_errors_are_json(server: WebServer) -> None:
    """Unknown paths and methods say so in JSON."""
    assert httpx.get(f"{server.url}/api/v1/nothing").json() == {"error": "Not Found"}
    answer = httpx.post(f"{server.url}/api/v1/job")
    assert (answer.status_code, answer.json()) == (405, {"error": "Method Not Allowed"})


@pytest.mark.parametrize("path", ["/", "/api/v1/job", "/static/app.js", "/nothing"])
def test_every_answer_carries_the_security_headers(server: WebServer, path: str) -> None:
    """Pages, data, scripts and errors alike."""
    headers = httpx.get(server.url + path).headers
    assert headers["content-security-policy"].startswith("default-src 'self';")
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["x-frame-options"] == "DENY"
    assert "server" not in headers


def test_data_is_never_cached(server: WebServer) -> None:
    """Old data must not be shown as new by a cache."""
    assert httpx.get(f"{server.url}/api/v1/job").headers["cache-control"] == "no-store"
    assert httpx.get(f"{server.url}/static/app.js").headers["cache-control"] == "no-cache"


# access


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_without_token_a_foreign_host_header_is_refused(server: WebServer, host: str) -> None:
    """A page that points its own name at 127.0.0.1 gets nothing."""
    answer = httpx.get(f"{server.url}/api/v1/job", headers={"host": host})
    assert answer.status_code in (400, 421)
    assert "demo-1" not in answer.text


@pytest.mark.parametrize("host", ["localhost", "localhost:1", "127.0.0.1", "[::1]:9440", "[::1]"])
def test_without_token_loopback_names_are_welcome(server: WebServer, host: str) -> None:
    """With and without port, as through a tunnel."""
    answer = httpx.get(f"{server.url}/api/v1/job", headers={"host": host})
    assert answer.status_code == 200


def test_token_is_needed_and_enough(source: FixedSource) -> None:
    """Bearer or query; anything else is 401 and tells what to send."""
    with serving(source, token=TOKEN) as server:
        url = f"{server.url}/api/v1/job"
        right = {"authorization": f"Bearer {TOKEN}", "host": "node7.cluster:9440"}
        assert httpx.get(url, headers=right).status_code == 200
        assert httpx.get(url, headers={"authorization": f"bearer {TOKEN}"}).status_code == 200
        assert httpx.get(url, params={"token": TOKEN}).status_code == 200
        wrong: list[dict[str, str]] = [
            {},
            {"authorization": "Bearer"},
            {"authorization": f"Bearer {TOKEN}x"},
            {"authorization": f"Basic {TOKEN}"},
            {"authorization": TOKEN},
        ]
        for headers in wrong:
            answer = httpx.get(url, headers=headers)
            assert answer.status_code == 401, headers
            assert answer.headers["www-authenticate"] == "Bearer"
            assert "demo-1" not in answer.text
        assert httpx.get(url, params={"token": ""}).status_code == 401
        assert httpx.get(url, params={"token": "t\u00f6ken"}).status_code == 401


@pytest.mark.parametrize(
    "path", ["/", "/metrics", "/api/v1/stream", "/api/v1/report", "/api/v1/openapi.json", "/x"]
)
def test_token_guards_everything_with_data(source: FixedSource, path: str) -> None:
    """Only probes and the page's own files are open."""
    with serving(source, token=TOKEN) as server:
        assert httpx.get(server.url + path).status_code == 401
        assert httpx.get(f"{server.url}/healthz").status_code == 200
        assert httpx.get(f"{server.url}/readyz").status_code == 200
        assert httpx.get(f"{server.url}/static/app.js").status_code == 200


def test_static_files_cannot_be_left(source: FixedSource) -> None:
    """No path leads out of the folder of static files, not even past the token."""
    with serving(source, token=TOKEN) as server:
        for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/../../api/v1/job"):
            with socket.create_connection(("127.0.0.1", server.port)) as raw:
                raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                assert b" 404 " in raw.recv(65536).split(b"\r\n")[0], path


# the stream


def test_stream_sends_the_snapshot_at_once_and_each_new_one(
    source: FixedSource, server: WebServer
) -> None:
    """First what is known, then what changes, each with its version as id."""
    with httpx.stream("GET", f"{server.url}/api/v1/stream") as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = answer.iter_lines()
        assert read_events(lines, 1) == [(1, sample_snapshot())]
        source.publish(sample_snapshot(steps=42))
        ((version, snapshot),) = read_events(lines, 1)
        assert (version, snapshot["job"]["step"]) == (2, 42)
        jsonschema.validate(snapshot, schema_of("Snapshot"), jsonschema.Draft202012Validator)


def test_stream_ends_up_at_the_newest_of_many(source: FixedSource, server: WebServer) -> None:
    """A burst is not queued: the reader arrives at the newest version."""
    with httpx.stream("GET", f"{server.url}/api/v1/stream") as answer:
        lines = answer.iter_lines()
        read_events(lines, 1)
        for steps in range(30, 60):
            source.publish(sample_snapshot(steps))
        version = 0
        while version < 31:
            ((version, snapshot),) = read_events(lines, 1)
        assert snapshot["job"]["step"] == 59


def test_stream_beyond_the_limit_is_503_and_a_place_frees_up(source: FixedSource) -> None:
    """The bound holds, says so, and a client that leaves makes room."""
    with serving(source, limits=StreamLimits(max_clients=2, interval_s=0.02)) as server:
        url = f"{server.url}/api/v1/stream"
        with httpx.stream("GET", url) as first, httpx.stream("GET", url) as second:
            # Kept, because a dropped iterator closes its stream.
            opened = [first.iter_lines(), second.iter_lines()]
            assert [len(read_events(lines, 1)) for lines in opened] == [1, 1]
            refused = httpx.get(url)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "10"
        wait_for(lambda: _status_of_stream(url) == 200, "a free place")


def _status_of_stream(url: str) -> int:
    with httpx.stream("GET", url) as answer:
        return answer.status_code


def test_stream_drops_a_client_that_does_not_read(source: FixedSource) -> None:
    """A stalled reader is cut off; others go on."""
    limits = StreamLimits(send_timeout_s=0.2, interval_s=0.005)
    big = sample_snapshot()
    big["incidents"] = big["incidents"] * 2000  # type: ignore[operator]
    source.publish(big)
    with serving(source, limits=limits) as server, socket.socket() as stalled:
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stalled.connect(("127.0.0.1", server.port))
        stalled.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: server.stream.clients == 1, "the stream to open")

        def dropped() -> bool:
            source.publish(big)
            return server.stream.clients == 0

        wait_for(dropped, "the stalled client to be dropped")
        with httpx.stream("GET", f"{server.url}/api/v1/stream") as answer:
            assert read_events(answer.iter_lines(), 1)


# start and stop


def test_server_port_in_use_is_one_clear_line(source: FixedSource, server: WebServer) -> None:
    """The error names the port and the fix."""
    with pytest.raises(ServeError) as caught, serving(source, port=server.port):
        pass
    text = str(caught.value)
    assert f"port {server.port}" in text
    assert "--port" in text
    assert "\n" not in text


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "::"])
def test_server_refuses_a_reachable_address_without_token(source: FixedSource, host: str) -> None:
    """Nothing is opened to other machines by accident."""
    app = create_app(source, token=None, metrics=fixed_metrics, report=dict)
    with pytest.raises(ServeError, match="--token"):
        WebServer(app, token=None, host=host, port=0)


def test_server_with_token_listens_anywhere(source: FixedSource) -> None:
    """With a token any address is allowed, and then any Host header."""
    app = create_app(source, token=TOKEN, metrics=fixed_metrics, report=dict)
    server = WebServer(app, token=TOKEN, host="0.0.0.0", port=0)
    server.start()
    try:
        url = f"http://127.0.0.1:{server.port}/api/v1/job?token={TOKEN}"
        assert httpx.get(url, headers={"host": "node7"}).status_code == 200
    finally:
        server.stop()


def test_server_unusable_address_is_one_clear_line(source: FixedSource) -> None:
    """An address that is not this machine's is named."""
    app = create_app(source, token=TOKEN, metrics=fixed_metrics, report=dict)
    with pytest.raises(ServeError, match=r"cannot listen on 192\.0\.2\.1 .*--host"):
        WebServer(app, token=TOKEN, host="192.0.2.1", port=0)


def test_server_stops_with_open_streams_and_frees_the_port(source: FixedSource) -> None:
    """Open pages do not hold the daemon, and the port can be taken again at once."""
    with serving(source, limits=StreamLimits()) as server:
        with httpx.stream("GET", f"{server.url}/api/v1/stream") as answer:
            lines = answer.iter_lines()
            read_events(lines, 1)
            begin = time.monotonic()
            server.stop()
            assert not server.is_running
            assert time.monotonic() - begin < 2.0
        with serving(source, port=server.port) as again:
            assert again.port == server.port


def test_server_stop_without_start_frees_the_port(source: FixedSource) -> None:
    """A daemon that fails between making and starting the server leaves nothing behind."""
    app = create_app(source, token=None, metrics=fixed_metrics, report=dict)
    server = WebServer(app, token=None, port=0)
    server.stop()
    with serving(source, port=server.port) as again:
        assert httpx.get(f"{again.url}/healthz").status_code == 200


def test_runbook_of_every_check_is_served_and_nothing_beside_them() -> None:
    """Plain text, under the token as all else; no other name reaches a file."""
    with serving(FixedSource(), token=TOKEN) as server, httpx.Client(base_url=server.url) as client:
        for check in CHECKS:
            answer = client.get(f"/runbooks/{check.alert}.md", params={"token": TOKEN})
            assert answer.headers["content-type"] == "text/plain; charset=utf-8"
            assert answer.text.startswith(f"# {check.alert}\n")
        for name in ("nothing.md", "..%2fapp.py", "%2e%2e/app.py"):
            assert client.get(f"/runbooks/{name}", params={"token": TOKEN}).status_code == 404
        assert client.get("/runbooks/NutpRankSlow.md").status_code == 401
