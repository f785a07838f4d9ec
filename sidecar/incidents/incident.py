"""An incident: one finding followed over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from sidecar.checks.finding import Finding


class IncidentState(StrEnum):
    """Life of an incident."""

    PENDING = "pending"
    FIRING = "firing"
    RESOLVED = "resolved"


@dataclass(slots=True, kw_only=True)
class Incident:
    """One incident. `id` is stable for its whole life and is the webhook id's stem.

    Times are unix nanoseconds; None where it has not happened.
    """

    id: str
    finding: Finding  # newest
    state: IncidentState
    opened_unix_ns: int
    opened_step: int
    last_seen_unix_ns: int
    fired_unix_ns: int | None = None
    resolved_unix_ns: int | None = None
    change_epochs: list[int] = field(default_factory=list)  # changes it caused
    trace_ids: list[str] = field(default_factory=list)
