"""The view says what docs/api.md promises, with None for what is unknown."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from ntp_core.observe import ChangeStatus
from sidecar.checks.finding import Severity
from sidecar.incidents.incident import IncidentState
from sidecar.ingest.state import JobState, RankState
from sidecar.view import (
    CheckRow,
    changes_view,
    checks_view,
    incidents_view,
    job_view,
    plan_view,
    ranks_view,
    snapshot_view,
)
from tests.support.sample_state import (
    NOW_NS,
    SECOND_NS,
    UNIX_OFFSET_NS,
    sample_checks,
    sample_incidents,
    sample_job,
)

API_PAGE = Path(__file__).parents[2] / "docs" / "api.md"


def snapshot() -> dict[str, Any]:
    """The sample as the API shows it."""
    return snapshot_view(
        sample_job(),
        sample_incidents(),
        sample_checks(),
        now_ns=NOW_NS,
        unix_offset_ns=UNIX_OFFSET_NS,
    )


def documented_keys(section: str) -> set[str]:
    """Keys of the outermost object that a section of docs/api.md shows as an example."""
    text = API_PAGE.read_text()
    block = text.split(f"\n## {section}\n")[1].split("```json\n")[1].split("\n```")[0]
    example = json.loads(re.sub(r"\.\.\.", "", block))
    shown = example.get(section, example)
    return set(shown[0] if isinstance(shown, list) else shown)


@pytest.mark.parametrize("section", ["job", "ranks", "plan", "changes", "incidents", "checks"])
def test_snapshot_keys_are_those_of_the_docs(section: str) -> None:
    """Each object has exactly the keys that docs/api.md shows."""
    shown = snapshot()[section]
    actual = set(shown[0] if isinstance(shown, list) else shown)
    assert actual == documented_keys(section)


def test_snapshot_is_strict_json() -> None:
    """NaN and infinity never get out: a loss that is not a number is null."""
    job = sample_job()
    for rank in job.ranks.values():
        rank.loss = math.nan
        rank.grad_norm = math.inf
    view = job_view(job, [], now_ns=NOW_NS)
    assert view["loss"] is None
    assert view["gradient_norm"] is None
    json.dumps(view, allow_nan=False)
    json.dumps(snapshot(), allow_nan=False)


def test_job_view_of_the_sample() -> None:
    """Step, times, counts and status."""
    view = job_view(sample_job(), sample_incidents(), now_ns=NOW_NS)
    assert view["step"] == 41
    assert view["steps"] == list(range(1, 42))
    assert view["step_time_s"] == view["step_times_s"][-1] == pytest.approx(0.421)
    assert view["loss_first"] == pytest.approx(5.325)
    assert (view["world_size"], view["ranks_alive"], view["ranks_dead"]) == (5, 5, 0)
    assert view["plan_epoch"] == 2
    assert view["started_unix_s"] == pytest.approx((NOW_NS + UNIX_OFFSET_NS) / 1e9 - 60)
    assert view["status"] == "degraded"


def test_job_view_without_ranks_is_unknown() -> None:
    """Nothing seen: null everywhere, status unknown."""
    view = job_view(JobState(job_id="j"), [], now_ns=NOW_NS)
    assert view["status"] == "unknown"
    unknown = ("step", "loss", "loss_first", "world_size", "plan_epoch", "step_time_s")
    assert all(view[key] is None for key in unknown)
    assert view["steps"] == view["step_times_s"] == []


def test_job_status_follows_incidents_then_silence() -> None:
    """Critical before warning before silence before healthy; an info incident changes nothing."""
    job, (_, slow) = sample_job(), sample_incidents()

    def status(severity: Severity | None, now_ns: int = NOW_NS) -> Any:
        incidents = []
        if severity is not None:
            finding = type(slow.finding)(
                check="slow_rank", subject="rank 1", severity=severity, summary="s"
            )
            slow.finding = finding
            incidents = [slow]
        return job_view(job, incidents, now_ns=now_ns)["status"]

    late = NOW_NS + 60 * SECOND_NS
    assert status(None) == status(Severity.INFO) == "healthy"
    assert status(None, late) == "unknown"
    assert status(Severity.WARNING, late) == "degraded"
    assert status(Severity.CRITICAL) == "critical"


def test_job_view_after_the_last_rank_left_keeps_its_step() -> None:
    """A finished job stands at its last step, not at 0."""
    job = sample_job()
    for rank in job.ranks.values():
        rank.alive, rank.exited = False, 0
    view = job_view(job, [], now_ns=NOW_NS + 60 * SECOND_NS)
    assert (view["step"], view["ranks_alive"], view["ranks_dead"]) == (41, 0, 0)
    assert (view["status"], view["exit_status"]) == ("ended", 0)


@pytest.mark.parametrize(
    ("statuses", "status"),
    [([0, 0], 0), ([0, 3], 3), ([1, 3], 1), ([0, None], None), ([-1, 0], None), ([-1, 7], 7)],
)
def test_job_view_exit_status_is_the_first_that_is_not_zero(
    statuses: list[int | None], status: int | None
) -> None:
    """A rank that was killed or left without telling makes it unknown, unless another one told."""
    job = JobState(job_id="j")
    for rank, exited in enumerate(statuses):
        job.ranks[rank] = RankState(rank=rank, pid=1, alive=False, exited=exited, steps_total=1)
    view = job_view(job, [], now_ns=NOW_NS)
    assert (view["status"], view["exit_status"]) == ("ended", status)
    job.ranks[0].alive, job.ranks[0].exited = True, None
    assert job_view(job, [], now_ns=NOW_NS)["exit_status"] is None


def test_job_view_before_the_first_step_is_starting() -> None:
    """Not healthy: nothing was trained yet, however long loading takes."""
    job = JobState(job_id="j")
    job.ranks[0] = RankState(rank=0, pid=1, alive=True, last_progress_ns=NOW_NS - 60 * SECOND_NS)
    assert job_view(job, [], now_ns=NOW_NS)["status"] == "starting"
    job.ranks[0].steps_total, job.ranks[0].last_progress_ns = 1, NOW_NS
    assert job_view(job, [], now_ns=NOW_NS)["status"] == "healthy"


@pytest.mark.parametrize(
    ("loss", "is_finite", "status"),
    [(2.0, True, "healthy"), (None, None, "healthy"), (math.nan, False, "degraded"),
     (math.inf, False, "degraded")],
)  # fmt: skip
def test_job_view_says_that_the_loss_is_not_finite(
    loss: float | None, is_finite: bool | None, status: str
) -> None:
    """Training went wrong although every rank lives and every step is committed."""
    job = sample_job()
    for rank in job.ranks.values():
        rank.loss = loss
    view = job_view(job, [], now_ns=NOW_NS)
    assert (view["loss_is_finite"], view["status"]) == (is_finite, status)


def test_job_view_first_loss_outlives_its_step() -> None:
    """The first loss stays known when its step is no longer kept."""
    job = sample_job()
    job.ranks[0].steps.popleft()
    assert job_view(job, [], now_ns=NOW_NS)["loss_first"] == pytest.approx(5.325)


def test_job_view_a_repeated_step_counts_once() -> None:
    """A step that ran again after a failure shows the time of its last run."""
    job = sample_job()
    again = job.ranks[0].steps[-1]
    for rank in job.ranks.values():
        rank.steps.append(
            type(again)(
                step=41,
                end_ns=NOW_NS,
                duration_ns=SECOND_NS // 4,
                busy_ns=1,
                tokens=1,
                loss=1.0,
                epoch=2,
                work=0.2,
            )
        )
    view = job_view(job, [], now_ns=NOW_NS)
    assert view["steps"] == list(range(1, 42))
    assert view["step_time_s"] == 0.25


def test_ranks_view_of_the_sample() -> None:
    """The slow rank is named with its ratio and its units; its peers are normal."""
    ranks = ranks_view(sample_job(), sample_incidents(), now_ns=NOW_NS)
    assert [r["health"] for r in ranks] == ["ok", "slow", "ok", "ok", "ok"]
    slow = ranks[1]
    assert slow["slowness"] == pytest.approx(3.1)
    assert slow["units"] == {"attention": 1, "mlp": 2, "vocab": 0}
    assert slow["collective"] is None
    assert slow["progress_age_s"] == pytest.approx(0.2)
    assert ranks[0]["collective"] == {
        "op": "all_reduce",
        "group": 3,
        "seq": 901,
        "age_s": pytest.approx(0.1),
    }
    assert (ranks[4]["replica"], ranks[4]["tp_rank"]) == (1, 1)


def test_ranks_view_busy_and_wait_make_the_step() -> None:
    """Busy and wait of the newest step add up to its time."""
    for rank in ranks_view(sample_job(), [], now_ns=NOW_NS)[:1]:
        assert rank["busy_s"] + rank["wait_s"] == pytest.approx(0.421)


@pytest.mark.parametrize(
    ("alive", "exited", "health"),
    [(True, None, "ok"), (False, None, "dead"), (False, 0, "exited"), (None, None, "unknown")],
)
def test_rank_health_follows_life(alive: bool | None, exited: int | None, health: str) -> None:
    """Dead, exited and unknown are told apart."""
    job = JobState(job_id="j")
    job.ranks[0] = RankState(rank=0, pid=1, alive=alive, exited=exited)
    assert ranks_view(job, [], now_ns=NOW_NS)[0]["health"] == health


def test_rank_health_shows_the_worst_incident() -> None:
    """Divergence outweighs slowness; resolved incidents and other ranks do not count."""
    job, (_, slow) = sample_job(), sample_incidents()
    diverged = type(slow)(
        id="inc-3",
        finding=type(slow.finding)(
            check="replica_divergence",
            subject="replica 0",
            severity=Severity.CRITICAL,
            summary="Replica 0 differs.",
            replica=0,
        ),
        state=IncidentState.FIRING,
        opened_unix_ns=0,
        opened_step=1,
        last_seen_unix_ns=0,
    )
    health = [r["health"] for r in ranks_view(job, [slow, diverged], now_ns=NOW_NS)]
    assert health == ["diverged", "diverged", "diverged", "ok", "ok"]
    diverged.state = slow.state = IncidentState.RESOLVED
    health = [r["health"] for r in ranks_view(job, [slow, diverged], now_ns=NOW_NS)]
    assert health == ["ok"] * 5


def test_rank_view_unknown_values_are_null() -> None:
    """A rank just seen has no step, share, units or slowness."""
    job = JobState(job_id="j")
    job.ranks[0] = RankState(rank=0, pid=1, alive=True)
    row = ranks_view(job, [], now_ns=NOW_NS)[0]
    unknown = ("share", "slowness", "busy_s", "wait_s", "units", "collective", "progress_age_s")
    assert all(row[key] is None for key in unknown)


def test_rank_outside_the_plan_has_no_place() -> None:
    """A rank that the plan in force leaves out shows no replica, though it had one."""
    job = sample_job()
    job.ranks[7] = RankState(rank=7, pid=1, alive=False, replica=1, tp_rank=2, work=0.2)
    row = ranks_view(job, [], now_ns=NOW_NS)[-1]
    assert [row[key] for key in ("replica", "tp_rank", "units", "share")] == [None] * 4


def test_rank_view_foreign_op_is_other() -> None:
    """An operation number that this version does not know is still shown."""
    job = sample_job()
    collective = job.ranks[0].collective
    assert collective is not None
    collective.op = 99
    assert ranks_view(job, [], now_ns=NOW_NS)[0]["collective"]["op"] == "other"


def test_plan_view_of_the_sample_and_of_none() -> None:
    """Shares in tp_rank order; nothing known is an empty plan."""
    view = plan_view(sample_job().plan)
    assert view["global_batch"] == 10
    assert view["counts"] == {"attention": 6, "mlp": 24, "vocab": 8}
    assert [r["tp_degree"] for r in view["replicas"]] == [3, 2]
    assert view["replicas"][0]["shares"]["mlp"] == [11, 2, 11]
    assert plan_view(None)["replicas"] == []
    assert plan_view(None)["epoch"] is None


def test_changes_view_of_the_sample() -> None:
    """A committed change with its bytes, times and the spans of its phases."""
    (change,) = changes_view(sample_job(), unix_offset_ns=UNIX_OFFSET_NS)
    assert (change["reason"], change["status"], change["verified"]) == (
        "rank_slow",
        "committed",
        True,
    )
    assert change["seconds"] == pytest.approx(0.41)
    assert change["started_unix_s"] == pytest.approx((NOW_NS + UNIX_OFFSET_NS) / 1e9 - 18)
    names = [s["name"] for s in change["spans"]]
    assert names[:2] == ["nutp.detect", "nutp.decide"]
    transfer = next(s for s in change["spans"] if s["name"] == "nutp.transfer")
    assert [c["rank"] for c in transfer["children"]] == [0, 1, 2, 3, 4]


def test_changes_view_running_and_failed() -> None:
    """A running change has neither duration nor verdict; a failed one is not verified."""
    job = sample_job()
    change = job.changes[0]
    change.status = change.end_ns = None
    (view,) = changes_view(job, unix_offset_ns=0)
    assert (view["status"], view["seconds"], view["verified"]) == ("running", None, None)
    change.status = ChangeStatus.ROLLED_BACK
    (view,) = changes_view(job, unix_offset_ns=0)
    assert (view["status"], view["verified"]) == ("rolled_back", False)


def test_incidents_view_is_newest_first_with_runbook() -> None:
    """Newest first; the runbook is that of the alert in the catalog."""
    slow, stuck = incidents_view(sample_incidents())
    assert slow["runbook"] == "alerts/runbooks/NutpRankSlow.md"
    assert (slow["state"], slow["resolved_unix_s"], slow["changes"]) == ("firing", None, [2])
    assert stuck["state"] == "resolved"
    assert stuck["resolved_unix_s"] > stuck["fired_unix_s"] > stuck["opened_unix_s"]


def test_checks_view_counts_firing_and_knows_strangers() -> None:
    """Firing comes from the incidents; a check outside the catalog is shown, not dropped."""
    rows = [*sample_checks(), CheckRow(name="new", ready=False, runs=0, failures=0)]
    view = checks_view(rows, sample_incidents())
    assert [c["firing"] for c in view] == [1, 0, 0, 0, 0]
    assert all(c["applies"] for c in view)
    assert view[0]["family"] == "time"
    assert (view[4]["family"], view[4]["help"]) == ("", "")
