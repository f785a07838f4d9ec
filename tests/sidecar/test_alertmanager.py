"""Incidents as alerts in a real Alertmanager, and its webhook format through our receiver."""

from __future__ import annotations

import json
import time
from dataclasses import replace

import httpx
import pytest

from ntp_core.errors import InvalidInput
from sidecar.checks.finding import Severity
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.notify.alertmanager import AlertmanagerClient, AlertmanagerFeed
from sidecar.notify.alerts import alert_of
from sidecar.notify.events import WebhookFormat, incident_event
from sidecar.notify.receiver import Received, Reply, WebhookReceiver
from tests.support import filled
from tests.support.servers import free_port, require_binary, start_alertmanager, wait_until

S = 1_000_000_000
PAGE = "http://node7:9999/"


def now_incident(
    state: IncidentState = IncidentState.FIRING, severity: Severity = Severity.WARNING
) -> Incident:
    """The sample incident, moved to the present: Alertmanager forgets what ended long ago."""
    incident = filled.incident(state, severity=severity)
    now_ns = time.time_ns()
    incident.opened_unix_ns = incident.fired_unix_ns = now_ns - 10 * S
    incident.last_seen_unix_ns = now_ns
    if state is IncidentState.RESOLVED:
        incident.resolved_unix_ns = now_ns
    return incident


def active(url: str) -> list[dict]:
    return httpx.get(f"{url}/api/v2/alerts", trust_env=False).json()


def test_real_alertmanager_shows_an_incident_and_drops_it_when_resolved(tmp_path) -> None:
    """Labels, annotations and start arrive; a resolved incident leaves the list."""
    with start_alertmanager(tmp_path) as server:
        client = AlertmanagerClient(server.url + "/")
        fired = now_incident()
        client.post([alert_of("demo-1", fired, PAGE)])
        (alert,) = wait_until(lambda: active(server.url), "alert shown")
        assert alert["labels"] == {
            "alertname": "NutpRankSlow",
            "check": "slow_rank",
            "incident": "inc-1",
            "nutp_job": "demo-1",
            "rank": "1",
            "replica": "0",
            "severity": "warning",
            "subject": "rank 1",
        }
        assert alert["annotations"]["summary"] == fired.finding.summary
        assert alert["annotations"]["description"] == "busy: 0.28 s; slowness: 3.1x"
        resolved = now_incident(IncidentState.RESOLVED)
        resolved.fired_unix_ns = fired.fired_unix_ns
        client.post([alert_of("demo-1", resolved, PAGE)])
        wait_until(lambda: not active(server.url), "alert gone")
        client.close()


def test_feed_follows_incidents_through_an_alertmanager_that_starts_late(tmp_path) -> None:
    """Posts fail until it is there; then firing, a change of severity and the end all arrive."""
    feed = AlertmanagerFeed(
        AlertmanagerClient(f"http://127.0.0.1:{free_port()}"),
        external_url=PAGE,
        repost_s=60,
        retry_s=0.05,
    )
    feed.start()
    feed.update("demo-1", [now_incident(IncidentState.PENDING), now_incident()])
    assert feed.stop()
    with start_alertmanager(tmp_path) as server:
        feed = AlertmanagerFeed(
            AlertmanagerClient(server.url), external_url=PAGE, repost_s=60, retry_s=0.05
        )
        feed.start()
        feed.update("demo-1", [now_incident(IncidentState.PENDING)])
        feed.update("demo-1", [now_incident()])
        wait_until(lambda: severities(server.url) == ["warning"], "firing")
        feed.update("demo-1", [now_incident(severity=Severity.CRITICAL)])
        wait_until(lambda: severities(server.url) == ["critical"], "louder, the old one gone")
        feed.update("demo-1", [now_incident(IncidentState.RESOLVED, Severity.CRITICAL)])
        wait_until(lambda: not severities(server.url), "resolved")
        assert feed.stop()


def severities(url: str) -> list[str]:
    return [a["labels"]["severity"] for a in active(url)]


def test_feed_repeats_firing_alerts_and_retries_the_resolved_one() -> None:
    """A firing alert is posted again and again; a resolved one until it was accepted."""
    posts: list[bool] = []  # whether each post says resolved

    def reply(received: Received) -> Reply:
        posts.append("endsAt" in json.loads(received.body)[0])
        return Reply(status=500 if posts.count(True) in (1, 2) and posts[-1] else 200)

    with WebhookReceiver(None, reply=reply) as receiver:
        client = AlertmanagerClient(receiver.url.removesuffix("/webhook"))
        feed = AlertmanagerFeed(client, external_url=PAGE, repost_s=0.05, retry_s=0.05)
        feed.start()
        feed.update("j", [now_incident()])
        receiver.wait_for(lambda r: len(r) == 3, 20)
        assert not any(posts)
        feed.update("j", [now_incident(IncidentState.RESOLVED)])
        wait_until(lambda: posts.count(True) == 3, "accepted at the third time", 20)
        assert feed.stop()
    assert posts.count(True) == 3


def test_feed_drops_a_resolved_alert_once_accepted(tmp_path) -> None:
    """With nothing left to tell the feed is silent, also when it stops."""
    with WebhookReceiver(None) as receiver:
        client = AlertmanagerClient(receiver.url.removesuffix("/webhook"))
        feed = AlertmanagerFeed(client, external_url=PAGE, repost_s=0.02, retry_s=0.02)
        feed.start()
        feed.update("j", [now_incident()])
        feed.update("j", [now_incident(IncidentState.RESOLVED)])
        ended = receiver.wait_for(lambda r: any(b"endsAt" in m.body for m in r), 20)
        wait_until(lambda: not feed.waiting, "accepted", 20)
        feed.update("j", [now_incident(IncidentState.RESOLVED)])
        assert feed.stop()
        assert len(receiver.received) == len(ended)


def test_refused_alerts_raise(tmp_path) -> None:
    """What Alertmanager answers with an error is an error here."""
    with start_alertmanager(tmp_path) as server:
        client = AlertmanagerClient(server.url)
        alert = alert_of("demo-1", now_incident(), PAGE)
        with pytest.raises(httpx.HTTPStatusError):
            client.post([replace(alert, labels=dict.fromkeys(alert.labels, ""))])
        client.close()
    with pytest.raises(InvalidInput, match="--alertmanager-url 'nonsense'"):
        AlertmanagerClient("nonsense")


def test_our_format_4_body_has_the_keys_of_the_real_one(tmp_path) -> None:
    """A real Alertmanager's webhook and ours have the same fields, of the same types."""
    with WebhookReceiver(None) as receiver:
        config = (
            "route: {receiver: hook, group_by: [alertname], group_wait: 0s, group_interval: 1s}\n"
            f"receivers: [{{name: hook, webhook_configs: [{{url: '{receiver.url}'}}]}}]\n"
        )
        with start_alertmanager(tmp_path, config) as server:
            client = AlertmanagerClient(server.url)
            incident = now_incident()
            client.post([alert_of("demo-1", incident, PAGE)])
            real = json.loads(receiver.wait_for(lambda r: len(r) >= 1, 60)[0].body)
            client.close()
    ours = json.loads(
        incident_event("demo-1", incident, WebhookFormat.ALERTMANAGER, external_url=PAGE).body
    )
    assert {k: type(v) for k, v in real.items()} == {k: type(v) for k, v in ours.items()}
    assert real["alerts"][0].keys() == ours["alerts"][0].keys()
    for key in ("labels", "annotations", "status"):
        assert real["alerts"][0][key] == ours["alerts"][0][key]
    for key in ("version", "status", "groupLabels", "groupKey", "commonLabels"):
        assert real[key] == ours[key]


@pytest.mark.parametrize(
    ("ci", "outcome"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)]
)
def test_missing_server_skips_a_test_but_fails_in_ci(monkeypatch, ci, outcome) -> None:
    """A test that needs a program says which; in CI nothing is left out in silence."""
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="needs 'no-such-program'"):
        require_binary("no-such-program")
