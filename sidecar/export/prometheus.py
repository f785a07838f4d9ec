"""Prometheus exposition, text 0.0.4 and OpenMetrics 1.0, through prometheus_client.

The daemon's tick feeds (`follow`) and publishes (`publish`); any thread may render what was
published last. Rendering never touches the state that a tick may be changing. The published numbers
are as old as the last tick: `nutp_sidecar_last_tick_timestamp_seconds` says how old that is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics import exposition as openmetrics

from sidecar import __version__
from sidecar.export.continuity import RestartOffsets
from sidecar.export.families import Families, Series, label_value
from sidecar.export.job_series import job_series, replica_series, sidecar_series
from sidecar.export.job_totals import JobTotals
from sidecar.export.negotiation import wants_openmetrics
from sidecar.export.rank_series import rank_counters, rank_gauges
from sidecar.export.selfstats import JobView, SidecarStats
from sidecar.ingest.slowness import slowness
from sidecar.ingest.state import Change, JobState, RankState, StepSample

MAX_RANKS = 1024
"""Ranks with series of their own, over all jobs; also replicas. The rest is counted as dropped."""


@dataclass(slots=True, kw_only=True)
class _Seen:
    """How far a job was followed."""

    steps: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # rank -> process, count
    changes: set[tuple[int, int]] = field(default_factory=set)  # epoch, begin


class Exporter:
    """Metrics of all jobs. One thread feeds it; rendering is safe from any thread.

    Args:
        max_ranks: limit on ranks exported, see `MAX_RANKS`.
        version: of the sidecar, for `nutp_build_info`.
    """

    def __init__(self, *, max_ranks: int = MAX_RANKS, version: str = __version__) -> None:
        self._max_ranks = max_ranks
        self._version = version
        self._offsets = RestartOffsets()
        self._totals: dict[str, JobTotals] = {}
        self._seen: dict[str, _Seen] = {}
        self._dropped: dict[tuple[str, str, str], int] = {}  # job, what, its number
        self._dropped_before = 0  # of jobs that are forgotten
        self._published: tuple[Family, ...] = ()
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def collect(self) -> Iterable[Family]:
        """What was published last (the collector protocol of prometheus_client)."""
        return self._published

    def observe_step(self, job: JobState, rank: RankState, sample: StepSample) -> None:
        """Count one newly committed step of a rank."""
        self._job_totals(job.job_id).observe_step(rank, sample, job.changes)

    def observe_change(self, job: JobState, change: Change) -> None:
        """Count one allocation change that has ended."""
        self._job_totals(job.job_id).observe_change(change)

    def follow(self, job: JobState) -> None:
        """Observe every step and ended change that is new since the last call for this job.

        To be called more often than `STEPS_KEPT` steps take, else the oldest are not counted.
        """
        seen = self._seen.setdefault(job.job_id, _Seen())
        for rank in job.ranks.values():
            process = (rank.pid, rank.start_ns)
            known = seen.steps.get(rank.rank, (*process, 0))
            count = known[2] if known[:2] == process else 0
            fresh = min(max(0, rank.steps_total - count), len(rank.steps))
            for sample in list(rank.steps)[len(rank.steps) - fresh :]:
                self.observe_step(job, rank, sample)
            seen.steps[rank.rank] = (*process, rank.steps_total)
        ended = {(c.epoch, c.begin_ns): c for c in job.changes if c.end_ns is not None}
        for key in ended.keys() - seen.changes:
            self.observe_change(job, ended[key])
        seen.changes = set(ended)

    def publish(self, views: Sequence[JobView], stats: SidecarStats, now_ns: int) -> None:
        """Make the present numbers the ones that are rendered. `now_ns` is the monotonic clock."""
        families = Families()
        room = self._max_ranks
        for view in sorted(views, key=lambda v: v.job.job_id):
            room -= self._add_job(families, view, now_ns, room)
        self._forget_all_but({v.job.job_id for v in views})
        dropped = self._dropped_before + sum(self._dropped.values())
        families.add_all(sidecar_series(self._version, stats, dropped))
        self._published = families.finish()

    def render(self, accept_header: str | None = None) -> tuple[bytes, str]:
        """The page for a scraper and its content type, in the form that it asked for."""
        if wants_openmetrics(accept_header):
            body: bytes = openmetrics.generate_latest(self._registry)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def _job_totals(self, job_id: str) -> JobTotals:
        return self._totals.setdefault(job_id, JobTotals(job_id=job_id))

    def _add_job(self, families: Families, view: JobView, now_ns: int, room: int) -> int:
        """Add one job with at most `room` ranks; returns the number of ranks it took."""
        state, label = view.job, label_value(view.job.job_id)
        totals = self._job_totals(state.job_id)
        totals.count_incidents(view.incidents)
        families.add_all(job_series(label, view, totals))
        for index in range(len(state.plan.replicas) if state.plan else 0):
            series = replica_series(label, state, index)
            key = (state.job_id, "replica", str(index))
            self._add_or_drop(families, key, series, index < self._max_ranks)
        self._add_histograms(families, label, totals)
        slow = slowness(state)
        for index, rank in enumerate(sorted(state.ranks)):
            series = self._rank_series(label, state, rank, slow.get(rank), now_ns)
            self._add_or_drop(families, (state.job_id, "rank", str(rank)), series, index < room)
        return min(room, len(state.ranks))

    def _add_histograms(self, families: Families, label: str, totals: JobTotals) -> None:
        for index, (replica, counts) in enumerate(totals.step_seconds.items()):
            if index < self._max_ranks:
                families.add_histogram("nutp_step_seconds", (label, replica), counts)
            else:
                self._dropped[totals.job_id, "steps", replica] = len(counts.rows()) + 2
        for reason, counts in totals.change_seconds.items():
            families.add_histogram("nutp_allocation_change_seconds", (label, reason), counts)

    def _rank_series(
        self, label: str, state: JobState, number: int, slow: float | None, now_ns: int
    ) -> list[Series]:
        rank = state.ranks[number]
        process = (rank.pid, rank.start_ns)
        counters = self._offsets.carry((state.job_id, number), process, rank_counters(rank))
        series = rank_gauges(label, rank, slow, now_ns)
        own = (label, str(number))
        series += [(name, (*own, *more), value) for (name, more), value in counters.items()]
        return series

    def _add_or_drop(
        self, families: Families, key: tuple[str, str, str], series: list[Series], fits: bool
    ) -> None:
        if fits:
            families.add_all(series)
        else:
            self._dropped[key] = max(self._dropped.get(key, 0), len(series))

    def _forget_all_but(self, job_ids: set[str]) -> None:
        self._offsets.keep_jobs(job_ids)
        self._totals = {k: v for k, v in self._totals.items() if k in job_ids}
        self._seen = {k: v for k, v in self._seen.items() if k in job_ids}
        gone = [k for k in self._dropped if k[0] not in job_ids]
        self._dropped_before += sum(self._dropped.pop(k) for k in gone)
