"""Incidents and checks: `/api/v1/incidents` and `/api/v1/checks`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from sidecar.catalog import CHECKS
from sidecar.incidents.incident import Incident, IncidentState

MAX_INCIDENTS = 256
"""Incidents in one answer; the oldest are left out beyond it."""

_INFO = {c.name: c for c in CHECKS}


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    """What is counted for one check: runs in which it could judge, and those that found a fault.
    `applies`: whether it can ever judge this job."""

    name: str
    ready: bool
    applies: bool = True
    runs: int
    failures: int


def incidents_view(incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Incidents, newest first."""
    newest = sorted(incidents, key=lambda i: i.opened_unix_ns, reverse=True)[:MAX_INCIDENTS]
    return [_incident_view(i) for i in newest]


def checks_view(checks: Iterable[CheckRow], incidents: Iterable[Incident]) -> list[dict[str, Any]]:
    """Checks in the order given, with the number of incidents that each has firing."""
    firing = [i.finding.check for i in incidents if i.state is IncidentState.FIRING]
    return [_check_view(row, firing.count(row.name)) for row in checks]


def _check_view(row: CheckRow, firing: int) -> dict[str, Any]:
    info = _INFO.get(row.name)
    return {
        "name": row.name,
        "family": info.family if info else "",
        "applies": row.applies,
        "ready": row.ready,
        "runs": row.runs,
        "failures": row.failures,
        "firing": firing,
        "help": info.help if info else "",
    }


def _incident_view(incident: Incident) -> dict[str, Any]:
    finding = incident.finding
    info = _INFO.get(finding.check)
    return {
        "id": incident.id,
        "check": finding.check,
        "severity": str(finding.severity),
        "state": str(incident.state),
        "subject": finding.subject,
        "summary": finding.summary,
        "signals": dict(finding.signals),
        "rank": finding.rank,
        "replica": finding.replica,
        "tensor": finding.tensor,
        "unit": finding.unit,
        "opened_step": incident.opened_step,
        "opened_unix_s": incident.opened_unix_ns / 1e9,
        "fired_unix_s": _seconds(incident.fired_unix_ns),
        "resolved_unix_s": _seconds(incident.resolved_unix_ns),
        "changes": list(incident.change_epochs),
        "trace_ids": list(incident.trace_ids),
        "runbook": f"alerts/runbooks/{info.alert}.md" if info else None,
    }


def _seconds(t_ns: int | None) -> float | None:
    return None if t_ns is None else t_ns / 1e9
