"""The one table of metrics, spans and checks. Exporters, dashboards, alerts and docs follow it.

Every per-rank series carries `nutp_job` (not `job`: that is the scrape's own label). Labels come
from this table only; steps, digests and messages never become labels.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class MetricType(StrEnum):
    """Prometheus types."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family. `name` is as exposed, without `_total`, `_info`, `_bucket`."""

    name: str
    type: MetricType
    unit: str
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class CheckInfo:
    """One check: what it watches, how loud it is, and the alert that pages for it."""

    name: str
    family: str
    severity: str
    alert: str
    help: str


_C, _G, _H, _I = MetricType.COUNTER, MetricType.GAUGE, MetricType.HISTOGRAM, MetricType.INFO
_JOB = ("nutp_job",)
_RANK = ("nutp_job", "rank")
_REPLICA = ("nutp_job", "replica")

STEP_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
CHANGE_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)

METRICS: tuple[Metric, ...] = (
    # the job
    Metric("nutp_build", _I, "", ("version",), "Version of the sidecar."),
    Metric("nutp_job_step", _G, "", _JOB, "Newest step that every living rank has committed."),
    Metric(
        "nutp_job_ranks",
        _G,
        "",
        ("nutp_job", "state"),
        "Ranks by state: alive, dead, exited, left (gone; the job goes on without them).",
    ),
    Metric("nutp_job_loss", _G, "", _JOB, "Mean loss per token of the newest step."),
    Metric("nutp_job_gradient_norm", _G, "", _JOB, "Gradient norm before clipping, newest step."),
    Metric("nutp_job_tokens", _C, "", _JOB, "Tokens trained, over all replicas."),
    Metric("nutp_step_seconds", _H, "seconds", _REPLICA, "Step time by replica.", STEP_BUCKETS),
    # ranks
    Metric("nutp_rank", _I, "", ("nutp_job", "rank", "replica", "tp_rank"), "Place of a rank."),
    Metric("nutp_rank_up", _G, "", _RANK, "1 while the rank's process lives, else 0."),
    Metric("nutp_rank_steps", _C, "", _RANK, "Steps committed."),
    Metric("nutp_rank_progress_age_seconds", _G, "seconds", _RANK, "Age of the newest record."),
    Metric("nutp_rank_busy_seconds", _C, "seconds", _RANK, "Time in own work, not waiting."),
    Metric("nutp_rank_wait_seconds", _C, "seconds", _RANK, "Step time outside own work."),
    Metric(
        "nutp_rank_slowness_ratio",
        _G,
        "ratio",
        _RANK,
        "Busy time divided by the plan's share, over the median of all ranks; 1 is normal.",
    ),
    Metric(
        "nutp_rank_share_ratio",
        _G,
        "ratio",
        _RANK,
        "Share of the job's own time that the plan expects of a rank.",
    ),
    Metric(
        "nutp_rank_phase_seconds",
        _C,
        "seconds",
        ("nutp_job", "rank", "phase"),
        "Time in each phase of a step.",
    ),
    Metric("nutp_rank_gc_pause_seconds", _C, "seconds", _RANK, "Time in Python's collector."),
    Metric(
        "nutp_ranks_killed",
        _C,
        "",
        _JOB,
        "Ranks that the sidecar killed because they stood still (kill_stopped).",
    ),
    # collectives
    Metric("nutp_collectives", _C, "", ("nutp_job", "rank", "op"), "Collectives finished."),
    Metric("nutp_collective_bytes", _C, "bytes", ("nutp_job", "rank", "op"), "Bytes handed in."),
    Metric("nutp_collective_seconds", _C, "seconds", ("nutp_job", "rank", "op"), "Time inside."),
    # allocation
    Metric("nutp_plan_epoch", _G, "", _JOB, "Epoch of the plan in force."),
    Metric("nutp_replica_tp_degree", _G, "", _REPLICA, "Ranks that share a replica."),
    Metric("nutp_replica_batch_sequences", _G, "", _REPLICA, "Sequences per step of a replica."),
    Metric(
        "nutp_allocation_changes",
        _C,
        "",
        ("nutp_job", "reason", "status"),
        "Allocation changes ended.",
    ),
    Metric(
        "nutp_allocation_change_seconds",
        _H,
        "seconds",
        ("nutp_job", "reason"),
        "Duration of allocation changes.",
        CHANGE_BUCKETS,
    ),
    Metric(
        "nutp_proposals_refused",
        _C,
        "",
        _JOB,
        "Proposals, and what lay in their place, that the job set aside.",
    ),
    Metric("nutp_allocation_moved_bytes", _C, "bytes", _JOB, "Bytes moved by changes."),
    Metric("nutp_allocation_lower_bound_bytes", _C, "bytes", _JOB, "Bytes that had to move."),
    # checks and incidents
    Metric("nutp_check_runs", _C, "", ("nutp_job", "check"), "Times a check judged."),
    Metric("nutp_check_failures", _C, "", ("nutp_job", "check"), "Times a check found a fault."),
    Metric("nutp_check_ready", _G, "", ("nutp_job", "check"), "1 when a check can judge, else 0."),
    Metric(
        "nutp_incidents_firing",
        _G,
        "",
        ("nutp_job", "check", "severity"),
        "Incidents firing now.",
    ),
    Metric("nutp_incidents", _C, "", ("nutp_job", "check", "severity"), "Incidents fired."),
    Metric("nutp_replica_checks", _C, "", _JOB, "Steps at which replicas were compared."),
    Metric("nutp_replica_mismatches", _C, "", _JOB, "Compared steps at which replicas differed."),
    # the sidecar itself
    Metric("nutp_probe_events", _C, "", _RANK, "Records read from a rank's ring."),
    Metric("nutp_probe_events_lost", _C, "", _RANK, "Records overwritten before they were read."),
    Metric("nutp_probe_event_seconds", _G, "seconds", _RANK, "Measured cost of one record."),
    Metric("nutp_sidecar_tick_seconds", _G, "seconds", (), "Duration of the newest tick."),
    Metric("nutp_sidecar_last_tick_timestamp_seconds", _G, "seconds", (), "Time of that tick."),
    Metric("nutp_sidecar_tick_errors", _C, "", (), "Ticks that failed and were survived."),
    Metric("nutp_sidecar_cpu_seconds", _C, "seconds", (), "Processor time of the sidecar."),
    Metric("nutp_sidecar_resident_memory_bytes", _G, "bytes", (), "Memory of the sidecar."),
    Metric("nutp_sidecar_series_dropped", _C, "", (), "Series left out by the rank limit."),
    Metric("nutp_sidecar_bad_rings", _C, "", (), "Ring files refused: foreign, torn or too new."),
    Metric("nutp_sidecar_bad_records", _C, "", (), "Records refused: torn, or without sense."),
    Metric(
        "nutp_sidecar_outlet_errors",
        _C,
        "",
        ("outlet",),
        "Errors survived in an outlet: webhook, alertmanager, traces.",
    ),
    Metric(
        "nutp_webhook_deliveries",
        _C,
        "",
        ("status",),
        "Deliveries: delivered, retried, dead; dropped: lost before they could be kept.",
    ),
    Metric("nutp_webhook_queue", _G, "", (), "Messages waiting in the outbox, or for it."),
)

CHECKS: tuple[CheckInfo, ...] = (
    CheckInfo(
        "slow_rank",
        "time",
        "warning",
        "NutpRankSlow",
        "One rank needs longer for its share of the plan than its peers for theirs.",
    ),
    CheckInfo(
        "no_progress",
        "time",
        "critical",
        "NutpJobStuck",
        "Ranks live but commit no step; names the rank that never arrived at the collective.",
    ),
    CheckInfo(
        "replica_divergence",
        "state",
        "critical",
        "NutpReplicaDiverged",
        "Replicas hold different parameters.",
    ),
    CheckInfo(
        "dead_rank", "time", "critical", "NutpRankDead", "A rank's process is gone without goodbye."
    ),
)

SPAN_CHANGE = "nutp.allocation_change"
SPAN_PHASES = (
    "nutp.detect",
    "nutp.decide",
    "nutp.quiesce",
    "nutp.regroup",
    "nutp.transfer",
    "nutp.verify",
    "nutp.resume",
    "nutp.rollback",
    "nutp.restore",
)
SPAN_RANK_TRANSFER = "nutp.transfer.rank"


def metric(name: str) -> Metric:
    """The metric of that name; KeyError names what is missing."""
    for m in METRICS:
        if m.name == name:
            return m
    raise KeyError(f"no metric '{name}' in the catalog")
