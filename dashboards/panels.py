"""The panels of the job dashboard, as a table of rows: what each shows, why, and its queries.

Metric and label names follow `sidecar.catalog`; a test compares them. `build.py` turns this table
into Grafana's JSON.
"""

from __future__ import annotations

from dataclasses import dataclass

NODE = 'job=~"$job", instance=~"$instance"'
JOB = f'{NODE}, nutp_job=~"$nutp_job"'
RANK = f'{JOB}, rank=~"$rank"'
RATE = "[$__rate_interval]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel.

    Attributes:
        queries: legend -> PromQL. An empty legend names the series by its labels.
        kind: "timeseries", "stat" or "table".
        limits: value -> colour from that value on, besides green below the lowest.
        stacked: draw series on top of each other.
        width: of Grafana's 24 columns.
    """

    title: str
    description: str
    unit: str
    queries: dict[str, str]
    kind: str = "timeseries"
    limits: tuple[tuple[float, str], ...] = ()
    stacked: bool = False
    width: int = 8


def stat(title: str, description: str, unit: str, query: str, *limits: tuple[float, str]) -> Panel:
    """A small panel with the newest value of one query."""
    return Panel(
        title=title,
        description=description,
        unit=unit,
        queries={title: query},
        kind="stat",
        limits=limits,
        width=3,
    )


def quantile(q: float, metric: str, labels: str) -> str:
    """PromQL: a quantile of a histogram, for each combination of `labels`."""
    return f"histogram_quantile({q}, sum by (le, {labels}) (rate({metric}_bucket{{{JOB}}}{RATE})))"


def per_second(metric: str, labels: str, selector: str = RANK) -> str:
    """PromQL: the rate of a counter, summed for each combination of `labels`."""
    return f"sum by ({labels}) (rate({metric}_total{{{selector}}}{RATE}))"


STATUS = (
    stat(
        "Ranks up",
        "Ranks whose process lives, as the sidecars see it.",
        "short",
        f"sum(nutp_rank_up{{{JOB}}})",
    ),
    stat(
        "Ranks dead",
        "Ranks whose process is gone without goodbye. Runbook: NutpRankDead.",
        "short",
        f'sum(nutp_job_ranks{{{JOB}, state="dead"}})',
        (1, "red"),
    ),
    stat(
        "Step",
        "Newest step that every living rank has committed. The lowest over all nodes.",
        "short",
        f"min(nutp_job_step{{{JOB}}})",
    ),
    stat(
        "Step time",
        "Median step time of all replicas. Compare with the panel below before you believe it.",
        "s",
        f"histogram_quantile(0.5, sum by (le) (rate(nutp_step_seconds_bucket{{{JOB}}}{RATE})))",
    ),
    stat(
        "Firing incidents",
        "Incidents that the sidecars see now, all checks and severities. 0 only while a sidecar "
        "reports the job.",
        "short",
        f"sum(nutp_incidents_firing{{{JOB}}}) or 0 * sum(nutp_job_ranks{{{JOB}}})",
        (1, "red"),
    ),
    stat(
        "Plan epoch",
        "Epoch of the plan in force. It grows by one with each allocation change.",
        "short",
        f"max(nutp_plan_epoch{{{JOB}}})",
    ),
    stat(
        "Replicas differed",
        "Compared steps at which replicas were not bit-identical, in the time shown. Must be 0. "
        "Runbook: NutpReplicaDiverged.",
        "short",
        f"max(increase(nutp_replica_mismatches_total{{{JOB}}}[$__range]))",
        (0.5, "red"),
    ),
    stat(
        "Sidecar age",
        "Time since the slowest sidecar last looked at its ranks: the dead-man. All values on this "
        "page are at least that old. Runbook: NutpSidecarDown.",
        "s",
        f"max(time() - nutp_sidecar_last_tick_timestamp_seconds{{{NODE}}})",
        (15, "orange"),
        (30, "red"),
    ),
)

SPEED = (
    Panel(
        title="Step time by replica",
        description="Median and 99th percentile of the step time, from the histogram, and the mean "
        "over five minutes. Purple lines are allocation changes.",
        unit="s",
        queries={
            "replica {{replica}} p50": quantile(0.5, "nutp_step_seconds", "replica"),
            "replica {{replica}} p99": quantile(0.99, "nutp_step_seconds", "replica"),
            "replica {{replica}} mean": "nutp_job_replica:nutp_step_seconds:mean_rate5m"
            '{job=~"$job", nutp_job=~"$nutp_job"}',
        },
        width=12,
    ),
    Panel(
        title="Rank slowness",
        description="Busy time for the plan's share, over the median rank. 1 is normal, whatever "
        "the shares; above 1.5 the rank is called slow. Runbook: NutpRankSlow.",
        unit="none",
        queries={
            "rank {{rank}}": f"max by (rank) (nutp_rank_slowness_ratio{{{RANK}}})",
            "rank {{rank}} over all nodes": "max by (rank) "
            f"(instance_nutp_job_rank:nutp_rank_slowness:ratio_rate2m{{{RANK}}})",
        },
        limits=((1.5, "red"),),
        width=12,
    ),
    Panel(
        title="Share of work",
        description="Share of the job's own time that the plan expects of each rank: its work over "
        "the speed the plan was made for. Uneven on purpose.",
        unit="percentunit",
        queries={"rank {{rank}}": f"max by (rank) (nutp_rank_share_ratio{{{RANK}}})"},
        stacked=True,
    ),
    Panel(
        title="Busy and wait",
        description="Seconds per second in own work and outside it. A rank that waits is a victim; "
        "one that never waits sets the pace.",
        unit="percentunit",
        queries={
            "rank {{rank}} busy": per_second("nutp_rank_busy_seconds", "rank"),
            "rank {{rank}} wait": per_second("nutp_rank_wait_seconds", "rank"),
        },
    ),
    Panel(
        title="Progress age",
        description="Time since each rank's newest record. A saw-tooth is healthy; a line that "
        "climbs is a stuck or dead rank. Runbook: NutpJobStuck.",
        unit="s",
        queries={"rank {{rank}}": f"max by (rank) (nutp_rank_progress_age_seconds{{{RANK}}})"},
    ),
    Panel(
        title="Phases of a step",
        description="Seconds per second in each phase, summed over the chosen ranks, and in "
        "Python's garbage collector.",
        unit="s",
        queries={
            "{{phase}}": per_second("nutp_rank_phase_seconds", "phase"),
            "gc": f"sum(rate(nutp_rank_gc_pause_seconds_total{{{RANK}}}{RATE}))",
        },
        stacked=True,
    ),
    Panel(
        title="Steps per second",
        description="Steps each rank commits per second. All ranks of a job move together.",
        unit="cps",
        queries={"rank {{rank}}": per_second("nutp_rank_steps", "rank")},
    ),
    Panel(
        title="Tokens per second",
        description="Tokens trained per second over all replicas, as one sidecar counts them.",
        unit="cps",
        queries={"tokens": f"max(rate(nutp_job_tokens_total{{{JOB}}}{RATE}))"},
    ),
)

COLLECTIVES = (
    Panel(
        title="Collective bytes",
        description="Bytes per second that the chosen ranks hand to collectives, by operation.",
        unit="binBps",
        queries={"{{op}}": per_second("nutp_collective_bytes", "op")},
    ),
    Panel(
        title="Collective time",
        description="Seconds per second inside collectives, by rank and operation. Includes the "
        "wait for the last rank to arrive.",
        unit="percentunit",
        queries={"rank {{rank}} {{op}}": per_second("nutp_collective_seconds", "rank, op")},
    ),
    Panel(
        title="Collectives per second",
        description="Collectives finished per second. Ranks of a group that differ here for long "
        "have not called the same ones.",
        unit="cps",
        queries={"rank {{rank}} {{op}}": per_second("nutp_collectives", "rank, op")},
    ),
)

TRAINING = (
    Panel(
        title="Loss",
        description="Mean loss per token of the newest step.",
        unit="none",
        queries={"loss": f"max(nutp_job_loss{{{JOB}}})"},
    ),
    Panel(
        title="Gradient norm",
        description="Gradient norm of the newest step, before clipping.",
        unit="none",
        queries={"gradient norm": f"max(nutp_job_gradient_norm{{{JOB}}})"},
    ),
    Panel(
        title="Replicas compared",
        description="Steps per second at which the fingerprints of replicas were compared, and at "
        "which they differed. No comparison means unknown, not equal.",
        unit="cps",
        queries={
            "compared": f"max(rate(nutp_replica_checks_total{{{JOB}}}{RATE}))",
            "differed": f"max(rate(nutp_replica_mismatches_total{{{JOB}}}{RATE}))",
        },
    ),
)

ALLOCATION = (
    Panel(
        title="Changes ended",
        description="Allocation changes by reason and status since the sidecars started. Totals, "
        "not an increase: such a series begins with its first change, which an increase misses.",
        unit="short",
        queries={
            "": "max by (nutp_job, reason, status) " + f"(nutp_allocation_changes_total{{{JOB}}})"
        },
        kind="table",
        width=6,
    ),
    Panel(
        title="Duration of changes",
        description="Median and 99th percentile of the time a change took, by reason.",
        unit="s",
        queries={
            "{{reason}} p50": quantile(0.5, "nutp_allocation_change_seconds", "reason"),
            "{{reason}} p99": quantile(0.99, "nutp_allocation_change_seconds", "reason"),
        },
        width=6,
    ),
    Panel(
        title="Bytes moved",
        description="Bytes that changes moved, and the least that had to move. Equal is right.",
        unit="bytes",
        queries={
            "moved": f"max(increase(nutp_allocation_moved_bytes_total{{{JOB}}}{RATE}))",
            "lower bound": f"max(increase(nutp_allocation_lower_bound_bytes_total{{{JOB}}}{RATE}))",
        },
        width=6,
    ),
    Panel(
        title="Degree and batch",
        description="Ranks that share each replica, and sequences it trains per step.",
        unit="short",
        queries={
            "replica {{replica}} degree": f"max by (replica) (nutp_replica_tp_degree{{{JOB}}})",
            "replica {{replica}} sequences": "max by (replica) "
            f"(nutp_replica_batch_sequences{{{JOB}}})",
        },
        width=6,
    ),
)

CHECKS = (
    Panel(
        title="Incidents by check",
        description="Incidents firing now, by check and severity.",
        unit="short",
        queries={
            "{{check}} {{severity}}": f"sum by (check, severity) (nutp_incidents_firing{{{JOB}}})"
        },
        stacked=True,
    ),
    Panel(
        title="Check runs and faults found",
        description="Judgements per second by check, and those that found a fault. A check that "
        "does not run says nothing.",
        unit="cps",
        queries={
            "{{check}} runs": per_second("nutp_check_runs", "check", JOB),
            "{{check}} faults": per_second("nutp_check_failures", "check", JOB),
        },
    ),
    Panel(
        title="Checks that can judge",
        description="1 when a check has enough data to judge on every node, else 0. At 0 its "
        "silence means unknown.",
        unit="short",
        queries={"{{check}}": f"min by (check) (nutp_check_ready{{{JOB}}})"},
    ),
)

SIDECAR = (
    Panel(
        title="Records read and lost",
        description="Records per second from the rings, and those overwritten unread. Runbook: "
        "NutpProbeLosingEvents.",
        unit="cps",
        queries={
            "read": per_second("nutp_probe_events", "nutp_job"),
            "lost": per_second("nutp_probe_events_lost", "nutp_job"),
        },
        width=6,
    ),
    Panel(
        title="Share of records lost",
        description="Lost records over all records, five minutes. The limit of the alert is 1 %.",
        unit="percentunit",
        queries={
            "rank {{rank}}": "max by (rank) (instance_nutp_job_rank:"
            "nutp_probe_events_lost_per_nutp_probe_events:ratio_rate5m"
            f"{{{RANK}}})"
        },
        limits=((0.01, "red"),),
        width=6,
    ),
    Panel(
        title="Cost of one record",
        description="Time the probe takes in the watched process to write one record, measured.",
        unit="s",
        queries={"rank {{rank}}": f"max by (rank) (nutp_probe_event_seconds{{{RANK}}})"},
        width=6,
    ),
    Panel(
        title="Sidecar tick",
        description="Duration of the newest tick (drain, check, publish) of each sidecar.",
        unit="s",
        queries={"{{instance}}": f"max by (instance) (nutp_sidecar_tick_seconds{{{NODE}}})"},
        width=6,
    ),
    Panel(
        title="Sidecar processor",
        description="Processor time of each sidecar, as a share of one core.",
        unit="percentunit",
        queries={"{{instance}}": per_second("nutp_sidecar_cpu_seconds", "instance", NODE)},
        width=6,
    ),
    Panel(
        title="Sidecar memory",
        description="Resident memory of each sidecar.",
        unit="bytes",
        queries={
            "{{instance}}": f"max by (instance) (nutp_sidecar_resident_memory_bytes{{{NODE}}})"
        },
        width=6,
    ),
    Panel(
        title="Sidecar trouble",
        description="Ticks that failed and were survived, ring files and records refused, series "
        "left out by the rank limit; ranks killed because they stood still, proposals that the job "
        "refused. Each should stay at 0.",
        unit="short",
        queries={
            "{{instance}} tick errors": "sum by (instance) "
            f"(increase(nutp_sidecar_tick_errors_total{{{NODE}}}{RATE}))",
            "{{instance}} bad rings": "sum by (instance) "
            f"(increase(nutp_sidecar_bad_rings_total{{{NODE}}}{RATE}))",
            "{{instance}} bad records": "sum by (instance) "
            f"(increase(nutp_sidecar_bad_records_total{{{NODE}}}{RATE}))",
            "{{instance}} {{outlet}} errors": "sum by (instance, outlet) "
            f"(increase(nutp_sidecar_outlet_errors_total{{{NODE}}}{RATE}))",
            "ranks killed": f"sum(increase(nutp_ranks_killed_total{{{JOB}}}{RATE}))",
            "proposals refused": f"sum(increase(nutp_proposals_refused_total{{{JOB}}}{RATE}))",
            "{{instance}} series dropped": "sum by (instance) "
            f"(increase(nutp_sidecar_series_dropped_total{{{NODE}}}{RATE}))",
        },
        width=6,
    ),
    Panel(
        title="Webhooks",
        description="Messages waiting in the outbox, and deliveries in each interval by outcome. A "
        "dead message was given up and will not arrive.",
        unit="short",
        queries={
            "waiting": f"sum(nutp_webhook_queue{{{NODE}}})",
            "{{status}}": "sum by (status) "
            f"(increase(nutp_webhook_deliveries_total{{{NODE}}}{RATE}))",
        },
        width=6,
    ),
)

ROWS: tuple[tuple[str, tuple[Panel, ...]], ...] = (
    ("Status", STATUS),
    ("Speed", SPEED),
    ("Collectives", COLLECTIVES),
    ("Training", TRAINING),
    ("Allocation changes", ALLOCATION),
    ("Checks and incidents", CHECKS),
    ("Sidecar and probe", SIDECAR),
)
