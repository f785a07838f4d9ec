"""An incident as an alert in the words of Prometheus and Alertmanager."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sidecar.catalog import CHECKS
from sidecar.incidents.incident import Incident, IncidentState

_ALERT_NAMES = {c.name: c.alert for c in CHECKS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One alert. Times are RFC 3339; `ends_at` is None while it fires."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    starts_at: str
    ends_at: str | None
    generator_url: str

    @property
    def status(self) -> str:
        """`firing` or `resolved`."""
        return "firing" if self.ends_at is None else "resolved"

    def to_json(self) -> dict[str, Any]:
        """The alert as `POST /api/v2/alerts` takes it."""
        body: dict[str, Any] = {
            "labels": dict(self.labels),
            "annotations": dict(self.annotations),
            "startsAt": self.starts_at,
            "generatorURL": self.generator_url,
        }
        if self.ends_at is not None:
            body["endsAt"] = self.ends_at
        return body


def alert_of(job_id: str, incident: Incident, generator_url: str) -> Alert:
    """The alert of an incident that fires or has resolved; it links to the page."""
    finding = incident.finding
    labels = {
        "alertname": _ALERT_NAMES.get(finding.check, f"Nutp_{finding.check}"),
        "check": finding.check,
        "nutp_job": job_id,
        "severity": str(finding.severity),
        "subject": finding.subject,
        "incident": incident.id,
    }
    for name, number in (("rank", finding.rank), ("replica", finding.replica)):
        if number is not None:
            labels[name] = str(number)
    signals = "; ".join(f"{name}: {text}" for name, text in sorted(finding.signals.items()))
    resolved = incident.state is IncidentState.RESOLVED
    ends_ns = (incident.resolved_unix_ns or incident.last_seen_unix_ns) if resolved else None
    return Alert(
        labels=labels,
        annotations={"summary": finding.summary, "description": signals or finding.summary},
        starts_at=rfc3339(incident.fired_unix_ns or incident.opened_unix_ns),
        ends_at=None if ends_ns is None else rfc3339(ends_ns),
        generator_url=generator_url,
    )


def rfc3339(unix_ns: int) -> str:
    """Unix nanoseconds as text, to the millisecond."""
    at = datetime.fromtimestamp(unix_ns / 1e9, UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")
