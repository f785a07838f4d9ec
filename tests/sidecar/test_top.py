"""The terminal view over a real server: frames, staleness, errors."""

from __future__ import annotations

import io
import json
import socket
import time
from collections.abc import Iterator

import pytest
from rich.console import Console

from sidecar.ingest.state import JobState
from sidecar.top import run_top
from sidecar.top.follow import Seen, Unreachable, follow
from sidecar.top.frame import frame
from sidecar.view import snapshot_view
from sidecar.web.server import WebServer
from sidecar.web.stream import StreamLimits
from tests.support.sample_state import sample_snapshot
from tests.support.web_source import FixedSource, serving


@pytest.fixture
def source() -> FixedSource:
    """The sample state."""
    return FixedSource()


@pytest.fixture
def server(source: FixedSource) -> Iterator[WebServer]:
    """A server without token."""
    with serving(source) as running:
        yield running


def rendered(seen: Seen, width: int = 80, height: int | None = None) -> str:
    """A frame as text."""
    console = Console(file=io.StringIO(), width=width)
    with console.capture() as captured:
        console.print(frame(seen, width=width, height=height))
    return captured.get()


def sample_seen(problem: str | None = None) -> Seen:
    """The sample as just received."""
    return Seen(snapshot=sample_snapshot(), at_unix_s=time.time(), problem=problem)


def unused_url() -> str:
    """An address at which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_frame_shows_the_sample_in_80_columns() -> None:
    """Job, ranks with shares and health, step time, change, incidents; no line is too long."""
    text = rendered(sample_seen())
    assert max(len(line) for line in text.splitlines()) <= 80
    for part in (
        "demo-1  ▲ degraded  step 41  421 ms  loss 2.427 (from 5.325)",
        "plan epoch 2",
        "3.10x",
        "▲ slow",
        "1/2/0",
        "Rank 1 needs 3.1x the time of its peers",
        "alerts/runbooks/NutpRankSlow.md",
        "✓ resolved after 7 s",
        "✓ committed",
        "2.15 MiB",
        "812 ms → 418 ms kept",
        "waiting for data: replica_divergence",
    ):
        assert part in text, part
    assert "STALE" not in text
    assert "…" not in text


def test_frame_tells_start_and_end_and_checks_that_cannot_apply() -> None:
    """An ended job waits for no data; a check that can never judge the job waits neither."""
    seen = sample_seen()
    job, checks = seen.snapshot["job"], seen.snapshot["checks"]
    checks[0] = {**checks[0], "ready": False, "applies": False}
    job |= {"status": "starting"}
    text = rendered(seen, width=120)
    assert "▷ starting  step 41" in text
    assert "waiting for data: replica_divergence; not applicable: slow_rank" in text
    job |= {"status": "ended", "exit_status": 3}
    text = rendered(seen, width=120)
    assert "○ ended, exit status 3  step 41" in text
    assert "waiting for data" not in text


def test_frame_stale_is_said_first() -> None:
    """Old values are never shown without saying so."""
    lines = rendered(sample_seen(problem="the sidecar is silent")).splitlines()
    assert lines[0].startswith(" STALE since ")
    assert "the sidecar is silent" in " ".join(lines[:2])


def test_frame_without_ranks_says_what_is_awaited() -> None:
    """An empty job tells how to start one."""
    empty = snapshot_view(JobState(job_id="j"), [], [], now_ns=1, unix_offset_ns=0)
    text = rendered(Seen(snapshot=empty, at_unix_s=0.0))
    assert "No rank seen yet. Start a job with: ntp-sidecar run --" in text


def test_frame_of_a_low_window_keeps_the_rank_in_trouble() -> None:
    """Healthy ranks make way, counted; the slow one stays."""
    text = rendered(sample_seen(), height=20)
    assert "▲ slow" in text
    assert "and 1 more ranks" in text


def test_frame_shows_markup_as_text() -> None:
    """Names from the job cannot style or break the terminal view."""
    seen = sample_seen()
    seen.snapshot["job"]["job_id"] = "[red]x[/nope]"
    assert "[red]x[/nope]" in rendered(seen)


def test_top_once_prints_one_frame(
    server: WebServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--once` prints and returns 0."""
    monkeypatch.setenv("COLUMNS", "80")
    assert run_top(server.url, once=True, as_json=False, token=None) == 0
    out, err = capsys.readouterr()
    assert "demo-1" in out
    assert err == ""


def test_top_without_terminal_prints_one_frame(
    server: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into a pipe it does not loop."""
    assert run_top(server.url + "/", once=False, as_json=False, token=None) == 0
    assert capsys.readouterr().out.count("plan epoch") == 1


def test_top_json_prints_the_snapshot(
    server: WebServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--json` prints what the stream sends."""
    assert run_top(server.url, once=False, as_json=True, token=None) == 0
    assert json.loads(capsys.readouterr().out) == sample_snapshot()


def test_top_unreachable_is_2_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing listens: the line names the address and the fix."""
    url = unused_url()
    assert run_top(url, once=True, as_json=False, token=None) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert url in err
    assert "--url" in err


@pytest.mark.parametrize("token", [None, "wrong"])
def test_top_without_the_token_is_2(
    source: FixedSource, capsys: pytest.CaptureFixture[str], token: str | None
) -> None:
    """A sidecar that wants a token says so, and how to give it."""
    with serving(source, token="right") as server:
        assert run_top(server.url, once=True, as_json=False, token=token) == 2
        err = capsys.readouterr().err
        assert "--token" in err
        assert err.count("\n") == 1
        assert run_top(server.url, once=True, as_json=False, token="right") == 0


@pytest.mark.parametrize("url", ["127.0.0.1:9440", "ftp://127.0.0.1", "http://[::1"])
def test_top_bad_url_is_2(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An address that is none is an error of one line, not a traceback."""
    assert run_top(url, once=True, as_json=False, token=None) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_follow_brings_new_snapshots(source: FixedSource, server: WebServer) -> None:
    """Each publish arrives."""
    news = follow(server.url, None)
    assert next(news).snapshot["job"]["step"] == 41
    source.publish(sample_snapshot(steps=42))
    seen = next(news)
    assert (seen.snapshot["job"]["step"], seen.problem) == (42, None)


def test_follow_over_a_restart_is_stale_then_live(source: FixedSource) -> None:
    """While the sidecar is gone the old snapshot comes with its problem; then it is live again."""
    with serving(source) as server:
        news = follow(server.url, None, retry_s=0.01)
        before = next(news)
        port = server.port
    stale = next(news)
    assert stale.problem is not None
    assert (stale.snapshot, stale.at_unix_s) == (before.snapshot, before.at_unix_s)
    with serving(source, port=port):
        live = next(seen for seen in news if seen.problem is None)
        assert live.at_unix_s >= before.at_unix_s


def test_follow_a_silent_sidecar_is_stale(source: FixedSource) -> None:
    """A server that lives but has no news is stale too: its tick may hang."""
    with serving(source, limits=StreamLimits(interval_s=0.02, heartbeat_s=0.05)) as server:
        news = follow(server.url, None, patience_s=0.2)
        assert next(news).problem is None
        assert next(news).problem == "the sidecar sends nothing new"
        source.publish(sample_snapshot(steps=42))
        assert next(seen for seen in news if seen.problem is None).snapshot["job"]["step"] == 42


def test_follow_without_sidecar_raises_at_once() -> None:
    """No snapshot at all: nothing to show as stale."""
    with pytest.raises(Unreachable, match="no sidecar answers"):
        next(follow(unused_url(), None))
