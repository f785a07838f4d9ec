"""Counts of one job that its state does not keep: the state holds the newest things only.

Fed in order by the daemon's tick, one call for each new step and ended change. Nothing here grows
with time: histograms have fixed buckets, keys come from enumerations and from the replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client.samples import Exemplar

from sidecar.catalog import CHANGE_BUCKETS, STEP_BUCKETS
from sidecar.export.histograms import BucketCounts
from sidecar.incidents.incident import Incident
from sidecar.ingest.spans import root_span_id, trace_id_of
from sidecar.ingest.state import Change, RankState, StepSample


@dataclass(slots=True, kw_only=True)
class JobTotals:
    """Running totals of one job."""

    job_id: str
    tokens: int = 0
    moved_bytes: int = 0
    lower_bound_bytes: int = 0
    changes: Counter[tuple[str, str]] = field(default_factory=Counter)  # reason, status
    incidents: Counter[tuple[str, str]] = field(default_factory=Counter)  # check, severity
    step_seconds: dict[str, BucketCounts] = field(default_factory=dict)  # replica ->
    change_seconds: dict[str, BucketCounts] = field(default_factory=dict)  # reason ->
    _newest: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """Replica -> epoch, step and end of its newest step."""
    _fired: set[str] = field(default_factory=set)

    def observe_step(
        self, rank: RankState, sample: StepSample, changes: Sequence[Change] = ()
    ) -> None:
        """Count a committed step once for its replica, whichever rank reports it first.

        A replica that is not known is counted under an empty label.
        """
        replica = "" if rank.replica is None else str(rank.replica)
        if not self._is_news(replica, rank, sample):
            return
        self.tokens += sample.tokens
        counts = self.step_seconds.setdefault(replica, BucketCounts(STEP_BUCKETS))
        seconds = sample.duration_ns / 1e9
        change = change_behind(changes, sample)
        unix_ns = sample.end_ns + rank.start_unix_ns - rank.start_ns if rank.start_unix_ns else None
        counts.observe(seconds, self._exemplar(change, seconds, unix_ns) if change else None)

    def _is_news(self, replica: str, rank: RankState, sample: StepSample) -> bool:
        known = self._newest.get(replica)
        # Steps run again from a checkpoint: under a later plan, or after a restart of the job in
        # a process that did not live yet when the newest step ended.
        is_later = known is None or (sample.epoch, sample.step) > known[:2]
        if known and not is_later and rank.start_ns <= known[2]:
            return False
        self._newest[replica] = (sample.epoch, sample.step, sample.end_ns)
        return True

    def _exemplar(self, change: Change, seconds: float, unix_ns: int | None = None) -> Exemplar:
        trace_id = change.trace_id or trace_id_of(self.job_id, change)
        labels = {"trace_id": trace_id, "span_id": root_span_id(trace_id)}
        return Exemplar(labels, seconds, None if unix_ns is None else round(unix_ns / 1e9, 3))

    def observe_change(self, change: Change) -> None:
        """Count a change that has ended. A change without end is not counted."""
        if change.end_ns is None or change.status is None:
            return
        reason = change.reason.name.lower()
        self.changes[reason, change.status.name.lower()] += 1
        self.moved_bytes += change.bytes_moved
        self.lower_bound_bytes += change.bytes_lower_bound
        seconds = max(0, change.end_ns - change.begin_ns) / 1e9
        counts = self.change_seconds.setdefault(reason, BucketCounts(CHANGE_BUCKETS))
        counts.observe(seconds, self._exemplar(change, seconds))

    def count_incidents(self, incidents: Iterable[Incident]) -> None:
        """Count incidents that fired since the last call; the same incident counts once."""
        fired = {i.id: i.finding for i in incidents if i.fired_unix_ns is not None}
        for incident_id in fired.keys() - self._fired:
            finding = fired[incident_id]
            self.incidents[finding.check, str(finding.severity)] += 1
        self._fired = set(fired)


def change_behind(changes: Sequence[Change], sample: StepSample) -> Change | None:
    """The newest change that affected a step: it ran under that change's plan, or during it."""
    begin_ns = sample.end_ns - sample.duration_ns
    behind = [
        c
        for c in changes
        if c.begin_ns <= sample.end_ns
        and (c.epoch == sample.epoch or c.end_ns is None or c.end_ns >= begin_ns)
    ]
    return max(behind, key=lambda c: c.begin_ns, default=None)
