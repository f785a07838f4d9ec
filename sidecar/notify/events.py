"""Bodies of webhooks: our typed events, or Alertmanager's webhook format version 4.

Pure: times come with the data. Ids are stable: the same happening has the same id however often it
is announced, also over a restart of the sidecar, so that the outbox and the receiver drop repeats.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.spans import stop_ns, trace_id_of
from sidecar.ingest.state import Change, JobState
from sidecar.notify.alerts import Alert, alert_of
from sidecar.view import changes_view, incidents_view

MAX_BODY_BYTES = 20_000
"""Largest body (Standard Webhooks, "Payload structure"). Longer signals are left out."""


class EventType(StrEnum):
    """Types of event."""

    INCIDENT_FIRED = "nutp.incident.fired"
    INCIDENT_RESOLVED = "nutp.incident.resolved"
    ALLOCATION_CHANGED = "nutp.allocation.changed"


class WebhookFormat(StrEnum):
    """Forms of body (`--webhook-format`)."""

    NUTP = "nutp"
    ALERTMANAGER = "alertmanager"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """One message for the outbox."""

    id: str
    body: bytes


def incident_event(
    job_id: str, incident: Incident, fmt: WebhookFormat, *, external_url: str
) -> Outgoing | None:
    """The message that an incident fired, or that it resolved; None while it is pending.

    Args:
        external_url: address of the page, for links.
    """
    if incident.state is IncidentState.PENDING or incident.fired_unix_ns is None:
        return None
    resolved = incident.state is IncidentState.RESOLVED
    word = "resolved" if resolved else "fired"
    at_ns = incident.resolved_unix_ns if resolved else incident.fired_unix_ns
    message_id = _message_id(job_id, incident.id, word, incident.opened_unix_ns)
    if fmt is WebhookFormat.ALERTMANAGER:
        return Outgoing(
            id=message_id, body=alertmanager_body(alert_of(job_id, incident, external_url))
        )
    kind = EventType.INCIDENT_RESOLVED if resolved else EventType.INCIDENT_FIRED
    data: dict[str, Any] = {"job_id": job_id, "incident": incidents_view([incident])[0]}
    body = _encode(kind, at_ns or incident.last_seen_unix_ns, data)
    if len(body) > MAX_BODY_BYTES:
        data["incident"]["signals"] = {}
        body = _encode(kind, at_ns or incident.last_seen_unix_ns, data)
    return Outgoing(id=message_id, body=body)


def change_event(
    job_id: str, change: Change, fmt: WebhookFormat, *, unix_offset_ns: int
) -> Outgoing | None:
    """The message that an allocation change ended.

    None before its end, and in Alertmanager's format, which knows alerts only.
    """
    if change.status is None or fmt is WebhookFormat.ALERTMANAGER:
        return None
    alone = JobState(job_id=job_id, changes=[change])
    data = changes_view(alone, unix_offset_ns=unix_offset_ns)[0]
    del data["spans"]  # grows with the ranks; the trace has them
    trace_id = change.trace_id or trace_id_of(job_id, change)
    return Outgoing(
        id=_message_id(job_id, f"change-{change.epoch}", "ended", trace_id),
        body=_encode(
            EventType.ALLOCATION_CHANGED,
            stop_ns(change) + unix_offset_ns,
            {"job_id": job_id, "change": data},
        ),
    )


def alertmanager_body(alert: Alert, receiver: str = "nutp") -> bytes:
    """One alert in Alertmanager's webhook format, version 4."""
    labels, annotations = dict(alert.labels), dict(alert.annotations)
    name = labels["alertname"]
    one = {
        "status": alert.status,
        "labels": labels,
        "annotations": annotations,
        "startsAt": alert.starts_at,
        "endsAt": alert.ends_at or "0001-01-01T00:00:00Z",
        "generatorURL": alert.generator_url,
        "fingerprint": _digest(sorted(labels.items())),
    }
    body = {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{name}"}}',
        "truncatedAlerts": 0,
        "status": alert.status,
        "receiver": receiver,
        "groupLabels": {"alertname": name},
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": alert.generator_url,
        "alerts": [one],
    }
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def _encode(kind: EventType, at_unix_ns: int, data: Mapping[str, Any]) -> bytes:
    at = datetime.fromtimestamp(at_unix_ns / 1e9, UTC).isoformat(timespec="milliseconds")
    body = {"type": str(kind), "timestamp": at.replace("+00:00", "Z"), "data": data}
    return json.dumps(body, ensure_ascii=False).encode("utf-8", "replace")


def _message_id(job_id: str, stem: str, word: str, once: object) -> str:
    """Incident ids and epochs start anew with the sidecar or the job; `once` tells those apart."""
    return f"{stem}-{word}-{_digest((job_id, once))}"


def _digest(value: object) -> str:
    return hashlib.sha256(repr(value).encode("utf-8", "replace")).hexdigest()[:16]
