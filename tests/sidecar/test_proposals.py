"""Proposals: when one is made, what is in it, and when none is."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from ntp_core.inbound.letter import Letter
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.proposal import FILE_NAME, MAX_BYTES, Proposal, check_proposal
from ntp_core.units import UnitKind
from sidecar.advice import plan_for_slow_rank
from sidecar.checks.finding import Finding, Severity
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.proposals import Autopilot, ProposalDesk, ProposalLimits, write_proposal
from tests.support.jobs import DrivenJob, plan_of

EVEN = ((8, 8, 8), (12, 12))


def slow_job(factor: float = 3.0) -> DrivenJob:
    """Ten healthy steps, then five with rank 1 slow."""
    job = DrivenJob(plan_of(EVEN))
    for step in range(15):
        job.commit({1: factor} if step >= 10 else None)
    return job


def incident(rank: int | None = 1, name: str = "inc-1") -> Incident:
    """A firing incident about a slow rank."""
    finding = Finding(
        check="slow_rank",
        subject=f"rank {rank}",
        severity=Severity.WARNING,
        summary="Slow.",
        rank=rank,
        step=13,
    )
    return Incident(
        id=name,
        finding=finding,
        state=IncidentState.FIRING,
        opened_unix_ns=1,
        opened_step=13,
        last_seen_unix_ns=1,
        fired_unix_ns=1,
    )


def desk(run_dir: Path, autopilot: Autopilot = Autopilot.ACT) -> ProposalDesk:
    """A desk with the real planner."""
    return ProposalDesk(run_dir, plan_for_slow_rank(), autopilot, ProposalLimits(cooldown_s=10))


def consider(d: ProposalDesk, job: DrivenJob, *incidents: Incident) -> Proposal | None:
    """One tick of the desk."""
    return d.consider(job.state, incidents, now_ns=job.clock.now_ns, now_unix_ns=job.clock.unix_ns)


def take(job: DrivenJob, proposal: Proposal) -> None:
    """The job takes the proposal at a step boundary."""
    assert job.state.plan is not None
    check_proposal(proposal, job.state.plan)
    job.change(proposal.plan, proposal.reason)


def read(run_dir: Path) -> Proposal:
    """What the job would read."""
    return Proposal.from_json((run_dir / FILE_NAME).read_text())


def mlp_shares(plan: Plan) -> list[tuple[int, ...]]:
    """Shares of each replica."""
    return [r.layouts[UnitKind.MLP].shares for r in plan.replicas]


def test_proposal_act_writes_a_plan_that_fits_the_job(tmp_path: Path) -> None:
    """The file is private, whole, accepted by the job's own check, and gives rank 1 less."""
    job = slow_job()
    made = consider(desk(tmp_path), job, incident())
    assert made is not None
    proposal = read(tmp_path)
    assert proposal == made
    assert job.state.plan is not None
    check_proposal(proposal, job.state.plan)
    assert proposal.reason is Reason.RANK_SLOW
    assert proposal.incident == "inc-1"
    assert mlp_shares(proposal.plan)[0][1] < 8
    mode = stat.S_IMODE((tmp_path / FILE_NAME).stat().st_mode)
    assert mode == 0o600
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]


def test_proposal_promise_lies_between_ideal_and_now(tmp_path: Path) -> None:
    """It promises a shorter step, and no plan can beat the ideal."""
    job = slow_job()
    made = consider(desk(tmp_path), job, incident())
    assert made is not None
    now_s = job.state.ranks[0].steps[-1].duration_ns / 1e9
    assert 0 < made.ideal_step_s <= made.promised_step_s < now_s


def test_proposal_advise_shows_and_writes_nothing(tmp_path: Path) -> None:
    """The default: the plan stands with the incident, also in later ticks, and no file is left."""
    job, d = slow_job(), desk(tmp_path, Autopilot.ADVISE)
    shown = incident()
    assert consider(d, job, shown) is not None
    assert "mlp" in shown.finding.signals["proposal"]
    assert list(tmp_path.iterdir()) == []
    fresh = incident()  # each tick brings a new finding
    assert consider(d, job, fresh) is None
    assert fresh.finding.signals == shown.finding.signals


def test_proposal_off_computes_nothing(tmp_path: Path) -> None:
    """Off is off."""
    shown = incident()
    assert consider(desk(tmp_path, Autopilot.OFF), slow_job(), shown) is None
    assert "proposal" not in shown.finding.signals


def test_proposal_pending_blocks_a_second(tmp_path: Path) -> None:
    """One at a time, even for another rank."""
    job, d = slow_job(), desk(tmp_path)
    consider(d, job, incident())
    before = read(tmp_path)
    assert consider(d, job, incident(), incident(3, "inc-2")) is None
    assert read(tmp_path) == before
    assert d.pending == before


def test_proposal_taken_is_withdrawn_and_no_other_while_it_is_judged(tmp_path: Path) -> None:
    """After the change: file gone, promise kept for the judge, silence until judged and cool."""
    job, d = slow_job(), desk(tmp_path)
    made = consider(d, job, incident())
    assert made is not None
    take(job, made)
    job.clock.advance(100)
    assert consider(d, job, incident(3, "inc-2")) is None
    assert not (tmp_path / FILE_NAME).exists()
    assert d.promises == {2: made}
    job.clock.advance(100)
    for _ in range(6):
        job.commit({1: 3.0, 3: 4.0})
    assert consider(d, job, incident(3, "inc-2")) is None, "still being judged"
    job.state.changes[-1].judged = "kept"
    assert consider(d, job, incident(3, "inc-2")) is not None


def test_proposal_ignored_is_withdrawn_and_made_again_after_the_cool_down(tmp_path: Path) -> None:
    """A job that never takes it does not leave a stale file behind for ever."""
    job, d = slow_job(), desk(tmp_path)
    consider(d, job, incident())
    job.clock.advance(61)
    assert consider(d, job, incident()) is None
    assert not (tmp_path / FILE_NAME).exists()
    assert d.promises == {}
    job.clock.advance(11)
    assert consider(d, job, incident()) is not None


def refuse(run_dir: Path, why: str) -> None:
    """The job sets the proposal aside, as its inbox does."""
    Letter(run_dir / FILE_NAME, MAX_BYTES).set_aside(why)


def test_proposal_refused_is_shown_and_not_made_again(tmp_path: Path) -> None:
    """The reason stands with the incident; a later incident about the rank gets no second one."""
    job, d, shown = slow_job(), desk(tmp_path), incident()
    made = consider(d, job, shown)
    assert made is not None
    refuse(tmp_path, "proposal names ranks [0, 1],\nthe job has [0]")
    assert consider(d, job, shown) is None
    assert d.pending is None and d.promises == {}
    said = "refused by the job (proposal names ranks [0, 1], the job has [0]): replica 0: mlp "
    assert shown.finding.signals["proposal"].startswith(said)
    job.clock.advance(700)
    again = incident(name="inc-2")
    assert consider(d, job, shown) is None
    assert consider(d, job, again) is None
    assert again.finding.signals["proposal"].startswith(said)
    assert not (tmp_path / FILE_NAME).exists()


def test_proposal_of_the_way_back_refused_is_told_with_the_change(tmp_path: Path) -> None:
    """The notice says that the change is being undone; then that the job did not take that."""
    job, d = slow_job(), desk(tmp_path)
    made = consider(d, job, incident())
    assert made is not None
    take(job, made)
    consider(d, job)
    change = job.state.changes[-1]
    change.judged = "undone"
    d.undo(job.state, change, now_ns=job.clock.now_ns, now_unix_ns=job.clock.unix_ns)
    refuse(tmp_path, "not now")
    notice = incident(None, "inc-9")
    notice.finding = replace(notice.finding, subject="change 2")
    consider(d, job, notice)
    assert d.pending is None
    assert notice.finding.signals["undo"].startswith("refused by the job (not now): replica 0")


def test_proposal_refused_to_an_earlier_sidecar_is_known(tmp_path: Path) -> None:
    """A sidecar that starts again does not ask the same once more."""
    job = slow_job()
    assert consider(desk(tmp_path), job, incident()) is not None
    refuse(tmp_path, "not now")
    shown = incident()
    assert consider(desk(tmp_path), job, shown) is None
    assert shown.finding.signals["proposal"].startswith("refused by the job (not now)")


def test_proposal_refused_under_another_plan_may_be_made_again(tmp_path: Path) -> None:
    """A refusal holds for the plan that the proposal was made from."""
    job, d = slow_job(), desk(tmp_path)
    consider(d, job, incident())
    refuse(tmp_path, "stale")
    consider(d, job, incident())
    job.change(plan_of(((8, 8, 8), (11, 13)), epoch=2), Reason.OPERATOR)
    job.clock.advance(60)
    for _ in range(6):
        job.commit({1: 3.0})
    assert consider(d, job, incident()) is not None


@pytest.mark.parametrize("kind", ["folder", "pipe", "noise", "nothing"])
def test_proposal_gone_without_a_sound_refusal_waits_its_time(tmp_path: Path, kind: str) -> None:
    """Whatever lies under the name of a refused one is passed over; an old reason is not taken."""
    job, d = slow_job(), desk(tmp_path)
    consider(d, job, incident())
    (tmp_path / FILE_NAME).unlink()
    strange = tmp_path / "proposal.refused.json"
    match kind:
        case "folder":
            strange.mkdir()
        case "pipe":
            os.mkfifo(strange)
        case "noise":
            strange.write_bytes(b"\xff{")
    assert consider(d, job, incident()) is None
    assert d.pending is not None
    job.clock.advance(61)
    consider(d, job, incident())
    assert d.pending is None


def test_proposal_overtaken_by_another_change_is_withdrawn(tmp_path: Path) -> None:
    """A rank died meanwhile and the plan is another: the old proposal is void."""
    job, d = slow_job(), desk(tmp_path)
    consider(d, job, incident())
    job.change(plan_of(((8, 8, 8), (11, 13)), epoch=2), Reason.OPERATOR)
    assert consider(d, job, incident()) is None
    assert not (tmp_path / FILE_NAME).exists()
    assert d.promises == {}


def test_proposal_undo_goes_back_to_the_old_plan_and_stays_quiet(tmp_path: Path) -> None:
    """NO_GAIN proposes plan A under a new epoch; the rank is left alone for long."""
    job, d = slow_job(), desk(tmp_path)
    old = job.state.plan
    made = consider(d, job, incident())
    assert made is not None and old is not None
    take(job, made)
    consider(d, job)
    change = job.state.changes[-1]
    change.judged, change.incident = "undone", "inc-1"
    d.undo(job.state, change, now_ns=job.clock.now_ns, now_unix_ns=job.clock.unix_ns)
    back = read(tmp_path)
    assert back.reason is Reason.NO_GAIN
    assert (back.plan.digest, back.plan.epoch) == (old.digest, 3)
    take(job, back)
    job.clock.advance(30)
    consider(d, job)
    for _ in range(5):
        job.commit({1: 3.0})
    job.clock.advance(300)
    assert consider(d, job, incident()) is None
    job.clock.advance(400)
    assert consider(d, job, incident()) is not None


def test_proposal_nothing_to_gain_none(tmp_path: Path) -> None:
    """Equal ranks on an even plan: no plan is faster, and the incident says so."""
    job, d, shown = DrivenJob(plan_of(((8, 8, 8),))), desk(tmp_path), incident()
    for _ in range(8):
        job.commit()
    assert consider(d, job, shown) is None
    assert shown.finding.signals["proposal"] == "no plan is faster by enough"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["plan", "model", "steps"])
def test_proposal_too_little_known_none(tmp_path: Path, missing: str) -> None:
    """Without plan, model or a measurement of every rank there is nothing to propose."""
    job = slow_job()
    match missing:
        case "plan":
            job.state.plan = None
        case "model":
            job.state.model = None
        case _:
            job.state.ranks[4].steps.clear()
    assert consider(desk(tmp_path), job, incident()) is None
    assert list(tmp_path.iterdir()) == []


def test_proposal_run_dir_gone_is_counted_not_raised(tmp_path: Path) -> None:
    """A directory that vanished costs the proposal and nothing else."""
    d = desk(tmp_path / "gone")
    assert consider(d, slow_job(), incident()) is not None
    assert d.write_errors == 1
    assert d.pending is None


def test_proposal_write_replaces_atomically(tmp_path: Path) -> None:
    """The newer proposal takes the place of the older; no draft is left."""
    plan = plan_of(EVEN, epoch=2)
    for incident_id in ("a", "b"):
        write_proposal(
            tmp_path,
            Proposal(base_digest="0" * 16, plan=plan, reason=Reason.OPERATOR, incident=incident_id),
        )
    assert read(tmp_path).incident == "b"
    assert [p.name for p in tmp_path.iterdir()] == [FILE_NAME]
