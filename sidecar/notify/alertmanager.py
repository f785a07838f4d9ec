"""Client of an Alertmanager: posts incidents as alerts to `/api/v2/alerts`.

Alertmanager keeps state, not messages: a firing alert is posted again and again, and one that is no
longer posted resolves by itself after its `resolve_timeout`. So no queue is needed: a thread posts
the newest state, at once when it changes and every `REPOST_S` while anything fires, and posts each
resolved incident until that was accepted once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace

import httpx

from sidecar import __version__
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.notify.alerts import Alert, alert_of, rfc3339
from sidecar.notify.endpoint import check_url, is_loopback, redacted

log = logging.getLogger(__name__)

REPOST_S = 60.0
"""Well below Alertmanager's default resolve_timeout of 5 minutes."""
RETRY_S = 5.0
TIMEOUT_S = 10.0

_Key = tuple[str, str, str]  # job, incident, severity of an alert that ended before its incident


class AlertmanagerClient:
    """Posts alerts to one Alertmanager.

    Args:
        url: its base address, as in `--alertmanager-url`.
        timeout_s: for each of connect, write and read.
    """

    def __init__(self, url: str, *, timeout_s: float = TIMEOUT_S) -> None:
        self._url = check_url(url, "--alertmanager-url").rstrip("/")
        self._client = httpx.Client(
            timeout=timeout_s,
            follow_redirects=False,
            trust_env=not is_loopback(url),
            headers={"user-agent": f"ntp-sidecar/{__version__}"},
        )

    @property
    def shown_url(self) -> str:
        """The address without what may be secret."""
        return redacted(self._url)

    def post(self, alerts: Sequence[Alert]) -> None:
        """Post alerts. Posting the same alert again refreshes it.

        Raises:
            httpx.HTTPError: when it cannot be reached or does not accept them.
        """
        body = [a.to_json() for a in alerts]
        self._client.post(f"{self._url}/api/v2/alerts", json=body).raise_for_status()

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


class AlertmanagerFeed:
    """Keeps an Alertmanager's view of one sidecar's incidents up to date, in a thread.

    `update` never waits for the network. Memory: one alert an incident that fires or has resolved
    since the last accepted post; bounded by the incidents the tracker keeps.
    """

    def __init__(
        self,
        client: AlertmanagerClient,
        *,
        external_url: str,
        repost_s: float = REPOST_S,
        retry_s: float = RETRY_S,
    ) -> None:
        self._client = client
        self._external_url = external_url
        self._repost_s = repost_s
        self._retry_s = retry_s
        self._changed = threading.Condition()
        self._firing: dict[_Key, Alert] = {}
        self._resolved: dict[_Key, Alert] = {}  # not accepted yet
        self._fresh = self._stopping = self._failing = False
        self._thread = threading.Thread(target=self._run, name="alertmanager-feed", daemon=True)

    def start(self) -> None:
        """Start posting."""
        self._thread.start()

    def update(self, job_id: str, incidents: Iterable[Incident]) -> None:
        """Take over the present state of these incidents. Cheap; call it with every tick."""
        with self._changed:
            for incident in incidents:
                self._fresh |= self._take(job_id, incident)
            if self._fresh:
                self._changed.notify_all()

    @property
    def waiting(self) -> int:
        """Alerts that fire, or whose end was not accepted yet."""
        with self._changed:
            return len(self._firing) + len(self._resolved)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Stop within `timeout_s`. False when a post was still under way."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _take(self, job_id: str, incident: Incident) -> bool:
        """Whether this incident needs a post now."""
        key = (job_id, incident.id, "")
        known = self._firing.get(key)
        alert = alert_of(job_id, incident, self._external_url)
        if incident.state is IncidentState.FIRING:
            self._firing[key] = alert
            if known is None or known.labels == alert.labels:
                return known is None
            # With another severity it is another alert for Alertmanager; the old one has ended.
            old = (job_id, incident.id, known.labels["severity"])
            self._resolved[old] = replace(known, ends_at=rfc3339(incident.last_seen_unix_ns))
            return True
        if incident.state is IncidentState.RESOLVED and known is not None:
            del self._firing[key]
            self._resolved[key] = alert
            return True
        return False

    def _run(self) -> None:
        wait_s = 0.0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._fresh or self._stopping, wait_s)
                stopping, self._fresh = self._stopping, False
                firing, resolved = list(self._firing.values()), dict(self._resolved)
            # One more post on the way out: what resolved last should not wait for a timeout.
            accepted = self._post([*firing, *resolved.values()])
            if stopping:
                break
            with self._changed:
                if accepted:
                    self._resolved = {
                        k: v for k, v in self._resolved.items() if resolved.get(k) is not v
                    }
            wait_s = self._repost_s if accepted else self._retry_s
        self._client.close()

    def _post(self, alerts: list[Alert]) -> bool:
        if not alerts:
            return True
        try:
            self._client.post(alerts)
        except (httpx.HTTPError, httpx.InvalidURL, OSError) as error:
            if not self._failing:
                reason = type(error).__name__
                log.warning("Alertmanager at %s: %s; retrying", self._client.shown_url, reason)
            self._failing = True
            return False
        self._failing = False
        return True
