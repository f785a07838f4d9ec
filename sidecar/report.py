"""The summary of a whole run: the body of `/api/v1/report`.

Every number was measured by this run. What nobody measured is None, and what is not finite too.
Parity with one process and the receiver's view of a webhook's signature come from outside: who
measured them leaves `facts.json` in the run directory.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

from ntp_core.inbound.plain_json import finite_or_none
from ntp_core.inbound.regular_file import read_regular
from ntp_core.observe import Reason
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.spans import is_verified, start_ns, stop_ns
from sidecar.ingest.state import Change, Fault, JobState

FACTS_FILE = "facts.json"
MAX_FACTS_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a report needs beside state and incidents; None is not known.

    Attributes:
        unix_offset_ns: unix time minus the monotonic clock of the records.
        loss_first: mean loss per token of the first step.
        webhooks_sent, webhooks_delivered: messages queued, and taken by the endpoint.
        signature_verified: whether a receiver found the signatures right.
        max_rel_loss_diff_vs_single_process: largest relative difference of a step's loss.
        cpu_ratio: processor time of the sidecar over wall time.
        resident_memory_bytes: its resident set.
    """

    unix_offset_ns: int = 0
    loss_first: float | None = None
    webhooks_sent: int = 0
    webhooks_delivered: int = 0
    signature_verified: bool | None = None
    max_rel_loss_diff_vs_single_process: float | None = None
    cpu_ratio: float | None = None
    resident_memory_bytes: int | None = None


class OutsideFacts(TypedDict, total=False):
    """The part of `RunFacts` that only others can measure."""

    max_rel_loss_diff_vs_single_process: float
    signature_verified: bool


def read_outside_facts(run_dir: Path) -> OutsideFacts:
    """What `facts.json` says; what is missing, of another type or no number is left out."""
    path = run_dir / FACTS_FILE
    facts: OutsideFacts = {}
    try:
        body = json.loads(read_regular(path, MAX_FACTS_BYTES))
        parity = body.get("max_rel_loss_diff_vs_single_process")
        verified = body.get("signature_verified")
    except (OSError, ValueError, AttributeError, RecursionError):
        return facts
    if isinstance(parity, float) and math.isfinite(parity):
        facts["max_rel_loss_diff_vs_single_process"] = float(parity)
    if isinstance(verified, bool):
        facts["signature_verified"] = verified
    return facts


def build_report(job: JobState, incidents: Iterable[Incident], facts: RunFacts) -> dict[str, Any]:
    """The report as plain data for JSON."""
    return {
        "ranks": max((r.world_size for r in job.ranks.values()), default=0) or len(job.ranks),
        "replicas": _replicas(job),
        "steps": max((r.step for r in job.members or job.ranks.values()), default=0),
        "loss": {"first": finite_or_none(facts.loss_first), "last": _loss_last(job)},
        "parity": {
            "max_rel_loss_diff_vs_single_process": facts.max_rel_loss_diff_vs_single_process
        },
        "replicas_bit_identical_steps": job.identical_steps,
        "changes": [_change(c) for c in job.changes if c.reason is not Reason.START],
        "incidents": [
            _incident(job, i, facts) for i in incidents if i.state is not IncidentState.PENDING
        ],
        "webhooks": {
            "sent": facts.webhooks_sent,
            "delivered": facts.webhooks_delivered,
            "signature_verified": facts.signature_verified,
        },
        "probe": _probe(job),
        "sidecar": {"cpu_ratio": facts.cpu_ratio, "rss_bytes": facts.resident_memory_bytes},
    }


def _replicas(job: JobState) -> list[dict[str, Any]]:
    if job.plan is None:
        return []
    return [
        {
            "id": index,
            "tp_degree": len(r.ranks),
            "ranks": list(r.ranks),
            "shares": {str(k): list(v.shares) for k, v in r.layouts.items()},
        }
        for index, r in enumerate(job.plan.replicas)
    ]


def _loss_last(job: JobState) -> float | None:
    return None if job.lead is None else finite_or_none(job.lead.loss)


def _change(c: Change) -> dict[str, Any]:
    return {
        "reason": c.reason.name.lower(),
        "epoch": c.epoch,
        "from": c.old_digest,
        "to": c.new_digest,
        "bytes_moved": c.bytes_moved,
        "bytes_lower_bound": c.bytes_lower_bound,
        "verified": is_verified(c),
        "seconds": None if c.end_ns is None else (stop_ns(c) - start_ns(c)) / 1e9,
        "step_time_before_s": c.step_time_before_s,
        "step_time_after_s": c.step_time_after_s,
        "step_time_ideal_s": c.step_time_ideal_s,
        "trace_id": c.trace_id,
        "status": "running" if c.status is None else c.status.name.lower(),
        "error": c.error or None,
    }


def _incident(job: JobState, incident: Incident, facts: RunFacts) -> dict[str, Any]:
    finding = incident.finding
    fault = _fault_behind(job, incident, facts.unix_offset_ns)
    after_s = None
    if fault is not None and incident.fired_unix_ns is not None:
        after_s = (incident.fired_unix_ns - facts.unix_offset_ns - fault.t_ns) / 1e9
    return {
        "id": incident.id,
        "check": finding.check,
        "rank": finding.rank,
        "replica": finding.replica,
        "tensor": finding.tensor,
        "opened_step": incident.opened_step,
        "injected_step": None if fault is None else fault.step,
        "detected_after_steps": (
            None if fault is None else max(0, incident.opened_step - fault.step)
        ),
        "detected_after_s": after_s,
        "resolved": incident.state is IncidentState.RESOLVED,
    }


def _fault_behind(job: JobState, incident: Incident, unix_offset_ns: int) -> Fault | None:
    """The newest deliberate fault on the blamed rank that came before the incident opened."""
    opened_ns = incident.opened_unix_ns - unix_offset_ns
    before = [f for f in job.faults if f.rank == incident.finding.rank and f.t_ns <= opened_ns]
    return max(before, key=lambda f: f.t_ns, default=None)


def _probe(job: JobState) -> dict[str, Any]:
    ranks = job.ranks.values()
    timed = sum(r.probe_cost_events for r in ranks)
    return {
        "events": sum(r.events_total for r in ranks),
        "ns_per_event": sum(r.probe_cost_ns for r in ranks) / timed if timed else None,
        "events_lost": sum(r.events_lost for r in ranks),
    }
