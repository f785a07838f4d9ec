"""What goes wrong in one outlet of the daemon costs no other outlet, and no tick, anything."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any, cast

from sidecar.checks.finding import Finding, Severity
from sidecar.config import load
from sidecar.daemon import Daemon
from sidecar.ingest.state import JobState
from sidecar.notify.receiver import WebhookReceiver
from sidecar.notify.signer import load_secret
from sidecar.web.app import create_app
from sidecar.web.server import WebServer
from tests.support.web_source import FixedSource, fixed_metrics


class Unspeakable:
    """A check with two findings: one holds what no JSON can say, the other is as usual."""

    name = "dead_rank"

    def applies(self, job: JobState) -> bool:
        """To any job."""
        return True

    def ready(self, job: JobState) -> bool:
        """Always."""
        return True

    def run(self, job: JobState, now_ns: int) -> list[Finding]:
        """The same findings at each tick."""
        return [self._finding(0, cast(Any, object())), self._finding(1, "1 s")]

    def _finding(self, rank: int, signal: str) -> Finding:
        return Finding(
            check=self.name,
            subject=f"rank {rank}",
            severity=Severity.CRITICAL,
            summary=f"Rank {rank}.",
            signals={"x": signal},
            rank=rank,
        )


def test_webhook_in_alertmanager_format_links_to_the_page_itself(tmp_path: Path) -> None:
    """Wherever the page is: here on a free port."""
    secret = load_secret(tmp_path / "state", environ={})
    with WebhookReceiver(secret) as receiver:
        settings = {
            "port": 0,
            "webhook_url": receiver.url,
            "webhook_format": "alertmanager",
            "state_dir": str(tmp_path / "state"),
        }
        daemon = Daemon(load(settings).config, tmp_path, checks=[Unspeakable()])
        daemon.start()
        try:
            got = receiver.wait_for(lambda kept: len(kept) >= 1, 30)
        finally:
            daemon.stop()
    body = json.loads(got[0].body)
    assert body["externalURL"] == body["alerts"][0]["generatorURL"] == f"{daemon.url}/"


def test_link_of_a_page_on_all_addresses_names_this_machine() -> None:
    """0.0.0.0 is where it listens, and no place to go to from elsewhere."""
    app = create_app(FixedSource(), token="t", metrics=fixed_metrics, report=dict)
    server = WebServer(app, token="t", host="0.0.0.0", port=0)
    try:
        assert server.link == f"http://{socket.gethostname()}:{server.port}"
    finally:
        server.stop()


def test_outlet_error_is_counted_and_the_other_message_arrives(tmp_path: Path) -> None:
    """No tick fails, the count is on the page of metrics, the first traceback is kept."""
    secret = load_secret(tmp_path / "state", environ={})
    with WebhookReceiver(secret) as receiver:
        settings = {
            "port": 0,
            "webhook_url": receiver.url,
            "state_dir": str(tmp_path / "state"),
            "clear_s": 60,
        }
        daemon = Daemon(load(settings).config, tmp_path, checks=[Unspeakable()])
        daemon.start()
        try:
            (got,) = receiver.wait_for(lambda kept: len(kept) == 1, 30)
        finally:
            daemon.stop()
    assert b"Rank 1." in got.body
    assert (daemon.tick_errors, daemon.outlet_errors["webhook"]) == (0, 1)
    assert "not JSON serializable" in daemon.first_error
    text = daemon._metrics(None)[0].decode()
    assert 'nutp_sidecar_outlet_errors_total{outlet="webhook"} 1.0' in text
    assert 'nutp_webhook_deliveries_total{status="dropped"} 0.0' in text
