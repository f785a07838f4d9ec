"""Findings become incidents: pending, firing, resolved, and armed again.

Pure: time comes in as an argument. One incident for each (check, subject) is open at a time. A
resolved one stays in the list; when its finding comes back a new incident with a new id opens. A
subject that comes and goes is held longer each time instead of paging again and again.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from ntp_core.observe import Reason
from ntp_core.plan import Plan
from sidecar.checks.finding import Finding
from sidecar.incidents.cause import causes
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.state import Change

MAX_INCIDENTS = 256
"""Incidents kept. Beyond it the oldest resolved one is dropped; when all are open a new finding
is counted in `refused` and otherwise ignored."""
FLAP_WINDOW_NS = 600_000_000_000
FLAP_TIMES = 3
"""Fired this often within the window: each further time doubles the time to clear, up to 16x."""

Key = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """How a check's findings turn into incidents.

    Attributes:
        confirm: ticks in a row a finding must hold before its incident fires; 1 fires at once.
        clear_s: seconds it must be absent before the incident resolves.
    """

    confirm: int = 1
    clear_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """An incident has just fired or resolved (`state`)."""

    state: IncidentState
    incident: Incident


@dataclass(slots=True, kw_only=True)
class _Open:
    """What is remembered about an open incident."""

    incident: Incident
    ticks: int = 0
    last_seen_ns: int = 0


@dataclass(slots=True)
class IncidentTracker:
    """All incidents of one job."""

    job_id: str
    policies: Mapping[str, Policy] = field(default_factory=dict)
    refused: int = 0
    fired_total: dict[tuple[str, str], int] = field(default_factory=dict)  # (check, severity)
    _all: list[Incident] = field(default_factory=list)  # oldest first
    _open: dict[Key, _Open] = field(default_factory=dict)
    _fired_at: dict[Key, deque[int]] = field(default_factory=dict)
    _count: int = 0

    @property
    def incidents(self) -> list[Incident]:
        """Firing and resolved incidents and those still pending, oldest first."""
        return list(self._all)

    def update(
        self,
        findings: Iterable[Finding],
        *,
        now_unix_ns: int,
        step: int,
        judged: Collection[str] | None = None,
    ) -> list[Transition]:
        """Take in the findings of one tick.

        Args:
            findings: all that hold now.
            now_unix_ns: wall clock.
            step: the job's newest step, for `opened_step`.
            judged: checks that could judge in this tick; the silence of any other is unknown and
                resolves nothing. None means all.

        Returns:
            What fired and what resolved, in this order.
        """
        transitions = []
        seen: set[Key] = set()
        for finding in findings:
            seen.add((finding.check, finding.subject))
            if fired := self._take(finding, now_unix_ns, step):
                transitions.append(fired)
        for key in [k for k in self._open if k not in seen]:
            if judged is not None and key[0] not in judged:
                continue
            if resolved := self._miss(key, now_unix_ns):
                transitions.append(resolved)
        return transitions

    def link(
        self,
        changes: Iterable[Change],
        plans: Mapping[str, Plan] | None = None,
        unix_offset_ns: int = 0,
    ) -> None:
        """Tie changes to the incidents that caused them, in both directions.

        Args:
            plans: digest -> plan: they tell which ranks went and which came.
            unix_offset_ns: unix time minus the clock of changes.
        """
        for change in changes:
            for incident in self._causes(change, plans or {}, unix_offset_ns):
                change.incident = change.incident or incident.id
                if change.epoch not in incident.change_epochs:
                    incident.change_epochs.append(change.epoch)
                if change.trace_id and change.trace_id not in incident.trace_ids:
                    incident.trace_ids.append(change.trace_id)

    def find(self, incident_id: str) -> Incident | None:
        """The incident of that id, if it is still kept."""
        return next((i for i in self._all if i.id == incident_id), None)

    def firing(self) -> list[Incident]:
        """Incidents that fire now."""
        return [o.incident for o in self._open.values() if o.incident.state is IncidentState.FIRING]

    def _take(self, finding: Finding, now_ns: int, step: int) -> Transition | None:
        key = (finding.check, finding.subject)
        entry = self._open.get(key)
        if entry is None:
            entry = self._begin(finding, now_ns, step)
            if entry is None:
                return None
        entry.ticks += 1
        entry.last_seen_ns = now_ns
        incident = entry.incident
        incident.finding = finding
        incident.last_seen_unix_ns = now_ns
        if incident.state is not IncidentState.PENDING:
            return None
        if entry.ticks < self._policy(finding.check).confirm:
            return None
        incident.state = IncidentState.FIRING
        incident.fired_unix_ns = now_ns
        self._fired_at.setdefault(key, deque(maxlen=16)).append(now_ns)
        counted = (finding.check, str(finding.severity))
        self.fired_total[counted] = self.fired_total.get(counted, 0) + 1
        return Transition(state=IncidentState.FIRING, incident=incident)

    def _begin(self, finding: Finding, now_ns: int, step: int) -> _Open | None:
        if not self._make_room():
            self.refused += 1
            return None
        self._count += 1
        incident = Incident(
            id=incident_id(self.job_id, finding, now_ns, self._count),
            finding=finding,
            state=IncidentState.PENDING,
            opened_unix_ns=now_ns,
            opened_step=step if finding.step is None else finding.step,
            last_seen_unix_ns=now_ns,
        )
        self._all.append(incident)
        entry = _Open(incident=incident)
        self._open[(finding.check, finding.subject)] = entry
        return entry

    def _make_room(self) -> bool:
        if len(self._all) < MAX_INCIDENTS:
            return True
        for index, incident in enumerate(self._all):
            if incident.state is IncidentState.RESOLVED:
                self._fired_at.pop((incident.finding.check, incident.finding.subject), None)
                del self._all[index]
                return True
        return False

    def _miss(self, key: Key, now_ns: int) -> Transition | None:
        entry = self._open[key]
        if entry.incident.state is IncidentState.PENDING:
            # Never confirmed: it was noise, and nobody has heard of it.
            del self._open[key]
            self._all.remove(entry.incident)
            return None
        if now_ns - entry.last_seen_ns < self._clear_ns(key, now_ns):
            return None
        del self._open[key]
        entry.incident.state = IncidentState.RESOLVED
        entry.incident.resolved_unix_ns = now_ns
        return Transition(state=IncidentState.RESOLVED, incident=entry.incident)

    def _clear_ns(self, key: Key, now_ns: int) -> int:
        recent = sum(1 for t in self._fired_at.get(key, ()) if now_ns - t < FLAP_WINDOW_NS)
        factor = 1 << max(0, min(4, recent - FLAP_TIMES + 1))
        return int(self._policy(key[0]).clear_s * 1e9) * factor

    def _policy(self, check: str) -> Policy:
        return self.policies.get(check, Policy())

    def _causes(
        self, change: Change, plans: Mapping[str, Plan], unix_offset_ns: int
    ) -> list[Incident]:
        named = None if change.incident is None else self.find(change.incident)
        if named is not None and change.reason is not Reason.RANK_DIED:
            return [named]
        # Deaths may be seen one after the other: a change may answer more than its first.
        return causes(change, self._all, plans, unix_offset_ns)


def incident_id(job_id: str, finding: Finding, opened_unix_ns: int, count: int) -> str:
    """`inc-<count>-<8 hex>`: readable, and unlike any of an earlier sidecar of the same job."""
    text = f"{job_id}\0{finding.check}\0{finding.subject}\0{opened_unix_ns}"
    return f"inc-{count}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
