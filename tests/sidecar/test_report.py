"""The run report: exact keys, measured numbers, and null where nobody measured."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from ntp_core.observe import Reason
from sidecar.checks.finding import Finding, Severity
from sidecar.config import load
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.state import Change, Fault
from sidecar.report import RunFacts, build_report, read_outside_facts
from sidecar.watch import build_watch
from tests.support.clock import UNIX_OFFSET_NS
from tests.support.jobs import DrivenJob, plan_of

KEYS = {
    "": {
        "ranks", "replicas", "steps", "loss", "parity", "replicas_bit_identical_steps",
        "changes", "incidents", "webhooks", "probe", "sidecar",
    },
    "change": {
        "reason", "epoch", "from", "to", "bytes_moved", "bytes_lower_bound", "verified",
        "seconds", "step_time_before_s", "step_time_after_s", "step_time_ideal_s", "trace_id",
        "status", "error",
    },
    "incident": {
        "id", "check", "rank", "replica", "tensor", "opened_step", "injected_step",
        "detected_after_steps", "detected_after_s", "resolved",
    },
}  # fmt: skip


def incident(job: DrivenJob, rank: int | None, step: int, state: IncidentState) -> Incident:
    """An incident that fires now."""
    finding = Finding(
        check="slow_rank",
        subject=f"rank {rank}",
        severity=Severity.WARNING,
        summary="Slow.",
        rank=rank,
        replica=0,
        step=step,
    )
    return Incident(
        id="inc-1",
        finding=finding,
        state=state,
        opened_unix_ns=job.clock.unix_ns,
        opened_step=step,
        last_seen_unix_ns=job.clock.unix_ns,
        fired_unix_ns=job.clock.unix_ns,
    )


def run_job() -> tuple[DrivenJob, Incident]:
    """Steps, a fault on rank 1 after step 10, an incident three steps later, a change."""
    job = DrivenJob(plan_of(((8, 8, 8), (12, 12))))
    job.state.changes.append(
        Change(epoch=1, reason=Reason.START, step=0, old_digest="", new_digest="", begin_ns=0)
    )
    for _ in range(10):
        job.commit()
    for rank in (3, 1):
        job.state.faults.append(Fault(step=10, t_ns=job.clock.now_ns, fault=1, rank=rank, detail=0))
    for _ in range(3):
        job.commit({1: 3.0})
    seen = incident(job, 1, 13, IncidentState.RESOLVED)
    change = job.change(plan_of(((10, 4, 10), (12, 12)), epoch=2), Reason.RANK_SLOW)
    change.bytes_moved = change.bytes_lower_bound = 1234
    change.trace_id = "a" * 32
    job.state.identical_steps = 13
    ranks = job.state.ranks
    ranks[0].probe_cost_ns, ranks[0].probe_cost_events = 80_000, 200
    ranks[0].events_total, ranks[4].events_total, ranks[4].events_lost = 70, 30, 2
    return job, seen


def test_report_has_exactly_the_documented_keys() -> None:
    """Keys and nesting as documented, and all of it JSON."""
    job, seen = run_job()
    report = build_report(job.state, [seen], RunFacts())
    assert set(report) == KEYS[""]
    assert set(report["changes"][0]) == KEYS["change"]
    assert set(report["incidents"][0]) == KEYS["incident"]
    assert set(report["replicas"][0]) == {"id", "tp_degree", "ranks", "shares"}
    assert set(report["loss"]) == {"first", "last"}
    assert set(report["webhooks"]) == {"sent", "delivered", "signature_verified"}
    assert set(report["probe"]) == {"events", "ns_per_event", "events_lost"}
    assert set(report["sidecar"]) == {"cpu_ratio", "rss_bytes"}
    assert set(report["parity"]) == {"max_rel_loss_diff_vs_single_process"}
    json.dumps(report, allow_nan=False)


def test_report_numbers_are_those_of_the_run() -> None:
    """Every number is found again."""
    job, seen = run_job()
    facts = RunFacts(unix_offset_ns=UNIX_OFFSET_NS, loss_first=4.9, cpu_ratio=0.01)
    report = build_report(job.state, [seen], facts)
    assert (report["ranks"], report["steps"]) == (5, 13)
    assert report["replicas"][0]["shares"] == {"mlp": [10, 4, 10]}
    assert report["loss"]["first"] == 4.9
    assert report["loss"]["last"] == pytest.approx(5.0 * 0.99**13)
    assert report["probe"] == {"events": 100, "ns_per_event": 400.0, "events_lost": 2}
    (change,) = report["changes"]
    assert (change["reason"], change["epoch"], change["verified"]) == ("rank_slow", 2, True)
    assert change["seconds"] == pytest.approx(0.2)
    assert change["bytes_moved"] == change["bytes_lower_bound"] == 1234


def test_report_detection_is_measured_from_the_fault_on_the_same_rank() -> None:
    """Injected at step 10, seen at step 13, three steps of 1.02 s later."""
    job, seen = run_job()
    facts = RunFacts(unix_offset_ns=UNIX_OFFSET_NS)
    (row,) = build_report(job.state, [seen], facts)["incidents"]
    assert (row["injected_step"], row["detected_after_steps"]) == (10, 3)
    assert row["detected_after_s"] == pytest.approx(3 * 1.02 * 3 / 5 * 8 / 8, rel=0.2)
    assert row["resolved"] is True


def test_report_incident_without_a_fault_has_no_injection() -> None:
    """Nothing was injected on rank 0, or no rank is named: null."""
    job, _ = run_job()
    for rank in (0, None):
        row = incident(job, rank, 12, IncidentState.FIRING)
        (shown,) = build_report(job.state, [row], RunFacts())["incidents"]
        assert shown["injected_step"] is None
        assert shown["detected_after_steps"] is None
        assert shown["detected_after_s"] is None


def test_report_unknown_is_null_and_pending_is_left_out() -> None:
    """Nobody measured parity or a signature; a pending incident was never told."""
    job, _ = run_job()
    pending = incident(job, 1, 12, IncidentState.PENDING)
    report = build_report(job.state, [pending], RunFacts())
    assert report["incidents"] == []
    assert report["parity"]["max_rel_loss_diff_vs_single_process"] is None
    assert report["webhooks"]["signature_verified"] is None
    assert report["sidecar"] == {"cpu_ratio": None, "rss_bytes": None}


def test_report_empty_job() -> None:
    """Before any rank: zeros, empty lists and nulls, no error."""
    job = DrivenJob(plan_of(((8, 8, 8),)))
    job.state.ranks.clear()
    job.state.plan = None
    report = build_report(job.state, [], RunFacts())
    assert (report["ranks"], report["steps"], report["replicas"]) == (0, 0, [])
    assert report["loss"] == {"first": None, "last": None}
    assert report["probe"]["ns_per_event"] is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"max_rel_loss_diff_vs_single_process": 1e-7, "signature_verified": true}',
            {"max_rel_loss_diff_vs_single_process": 1e-7, "signature_verified": True},
        ),
        ('{"signature_verified": false, "other": 3}', {"signature_verified": False}),
        ('{"max_rel_loss_diff_vs_single_process": NaN, "signature_verified": "yes"}', {}),
        ('{"max_rel_loss_diff_vs_single_process": null}', {}),
        ("[1]", {}),
        ("not json", {}),
    ],
)
def test_report_outside_facts_are_checked(
    tmp_path: Path, text: str, expected: dict[str, object]
) -> None:
    """Whoever measured leaves a file; what is not a number or a truth value is unknown."""
    (tmp_path / "facts.json").write_text(text)
    assert read_outside_facts(tmp_path) == expected


def test_report_without_outside_facts_nothing_is_claimed(tmp_path: Path) -> None:
    """No file, no claim."""
    assert read_outside_facts(tmp_path) == {}


def test_report_of_a_plain_job_names_its_first_known_loss() -> None:
    """A plain job reports NaN until its first loss is known, and that first one counts."""
    job = DrivenJob(plan_of(((8, 8, 8),)))
    for _ in range(4):
        job.commit()
    for rank in job.state.ranks.values():
        for sample, loss in zip(rank.steps, (math.nan, math.inf, 3.5, 3.25), strict=True):
            sample.loss = loss
    watch = build_watch(load({}, {}, None).config, job.state, Path())
    watch.tick(now_ns=job.clock.now_ns, now_unix_ns=job.clock.unix_ns)
    assert job.state.loss_first == 3.5


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_report_of_a_loss_that_is_not_finite_is_json(loss: float) -> None:
    """What JSON cannot hold is null."""
    job, seen = run_job()
    for rank in job.state.ranks.values():
        rank.loss = loss
    report = build_report(job.state, [seen], RunFacts(loss_first=loss))
    json.dumps(report, allow_nan=False)
    assert report["loss"] == {"first": None, "last": None}


def test_facts_that_are_no_file_are_left_out(tmp_path: Path) -> None:
    """A pipe under the name holds no request up."""
    os.mkfifo(tmp_path / "facts.json")
    assert read_outside_facts(tmp_path) == {}
