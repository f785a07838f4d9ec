"""What the daemon tells the exporter besides the jobs: numbers about the sidecar itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from sidecar.incidents.incident import Incident
from sidecar.ingest.state import JobState
from sidecar.view import CheckRow


@dataclass(frozen=True, slots=True, kw_only=True)
class SidecarStats:
    """The sidecar's own numbers at one tick. Counters count since its start; None is unknown.

    Attributes:
        tick_s: duration of the newest tick.
        last_tick_unix_s: when it ended.
        tick_errors: ticks that failed and were survived.
        cpu_s: processor time of this process, user and system.
        resident_memory_bytes: resident set of this process.
        bad_rings: ring files refused, of all jobs and of none.
        bad_records: records refused, of all jobs.
        webhooks_delivered, webhooks_retried, webhooks_dead: attempts by outcome.
        webhooks_dropped: messages lost before they could be kept.
        outlet_errors: outlet -> errors in it that a tick survived.
        webhooks_queued: messages that wait; None without an outbox.
    """

    tick_s: float | None = None
    last_tick_unix_s: float | None = None
    tick_errors: int = 0
    cpu_s: float = 0.0
    resident_memory_bytes: int | None = None
    bad_rings: int = 0
    bad_records: int = 0
    webhooks_delivered: int = 0
    webhooks_retried: int = 0
    webhooks_dead: int = 0
    webhooks_dropped: int = 0
    outlet_errors: Mapping[str, int] = field(default_factory=dict)
    webhooks_queued: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """One job with what the daemon knows beside its state."""

    job: JobState
    incidents: Sequence[Incident] = ()
    checks: Sequence[CheckRow] = ()
