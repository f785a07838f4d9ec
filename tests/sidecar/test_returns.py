"""A slow rank that is fast again gets its shares back, and they do not go to and fro."""

from __future__ import annotations

import itertools
from pathlib import Path

from ntp_core.observe import Reason
from ntp_core.proposal import Proposal
from ntp_core.units import UnitKind
from sidecar.advice import plan_for_slow_rank
from sidecar.checks.slow_rank import SlowRank
from sidecar.incidents.incident import Incident
from sidecar.judge import ChangeJudge
from sidecar.proposals import Autopilot, ProposalDesk, ProposalLimits
from sidecar.returns import ReturnLimits, Returns
from tests.sidecar.test_proposals import incident
from tests.support.jobs import DrivenJob, plan_of

GAPS = (0, 2, 5, 7, 11)
"""Ranks of an elastic job that has lost some and let in others."""
SLOW = 5
LIMITS = ReturnLimits(steps=8, hold_s=60.0)


def desk(run_dir: Path, autopilot: Autopilot = Autopilot.ACT) -> ProposalDesk:
    """A desk with the real planner, that does not cool down."""
    limits = ProposalLimits(cooldown_s=0)
    return ProposalDesk(run_dir, plan_for_slow_rank(), autopilot, limits, Returns(LIMITS))


def take(job: DrivenJob, made: Proposal) -> None:
    """The job takes a proposal, and expects of each rank what it was made for."""
    job.change(made.plan, made.reason)
    speeds = made.speeds
    job.expect({g: max(speeds.values()) / v for g, v in speeds.items()})


def relieve(d: ProposalDesk, job: DrivenJob, factor: float = 4.0) -> Proposal:
    """The rank turns slow, a plan is proposed and taken."""
    for _ in range(8):
        job.commit({SLOW: factor})
    made = d.consider(
        job.state, [incident(SLOW)], now_ns=job.clock.now_ns, now_unix_ns=job.clock.unix_ns
    )
    assert made is not None
    take(job, made)
    return made


def tick(d: ProposalDesk, job: DrivenJob, *known: Incident) -> Proposal | None:
    """One tick in which nothing fires."""
    now = {"now_ns": job.clock.now_ns, "now_unix_ns": job.clock.unix_ns}
    d.consider(job.state, [], **now)
    ChangeJudge().judge(job.state, d.promises, {}, now_ns=job.clock.now_ns)
    return d.give_back(job.state, known, **now)


def run(d: ProposalDesk, job: DrivenJob, steps: int, factor: float = 1.0) -> Proposal | None:
    """Steps, until something is proposed."""
    for _ in range(steps):
        job.commit({SLOW: factor})
        if made := tick(d, job, incident(SLOW, "inc-7")):
            return made
    return None


def gapped() -> DrivenJob:
    """Five ranks with gaps in their numbers, at work for a while."""
    job = DrivenJob(plan_of(((8, 8, 8), (12, 12)), ranks=GAPS))
    for _ in range(10):
        job.commit()
    return job


def shares(made: Proposal) -> list[tuple[int, ...]]:
    """MLP shares of each replica."""
    return [r.layouts[UnitKind.MLP].shares for r in made.plan.replicas]


def test_slow_rank_of_a_plan_with_gaps_is_relieved(tmp_path: Path) -> None:
    """Ranks keep their numbers; the slow one gets least."""
    made = relieve(desk(tmp_path), gapped())
    assert made.plan.ranks == GAPS
    first = shares(made)[0]
    assert first[2] < min(first[:2])


def test_shares_go_back_when_the_rank_is_fast_again(tmp_path: Path) -> None:
    """Nothing fires; the reason says that it has returned, the incident that it was slow."""
    d, job = desk(tmp_path), gapped()
    relieve(d, job)
    assert run(d, job, 30, factor=4.0) is None, "it is as slow as the plan expects"
    made = run(d, job, 30)
    assert made is not None
    assert (made.reason, made.incident) == (Reason.RANK_RETURNED, "inc-7")
    assert d.pending == made
    take(job, made)
    assert max(map(max, shares(made))) - min(map(min, shares(made))) <= 5
    assert run(d, job, 60) is None, "nothing is left to give back"


def test_shares_stay_without_act(tmp_path: Path) -> None:
    """Advice belongs to an incident, and there is none."""
    d, job = desk(tmp_path), gapped()
    relieve(d, job)
    d.autopilot = Autopilot.ADVISE
    assert run(d, job, 40) is None


def test_even_job_with_some_noise_is_left_alone(tmp_path: Path) -> None:
    """A rank that is a little faster than its peers is no reason to move anything."""
    d, job = desk(tmp_path), gapped()
    for _ in range(60):
        job.commit({SLOW: 0.75})
        assert tick(d, job) is None


def test_rank_that_turns_slow_again_and_again_gets_shares_back_ever_more_rarely(
    tmp_path: Path,
) -> None:
    """Slow for eight steps, free for forty, and so on: the changes become fewer."""
    d, job, check = desk(tmp_path), gapped(), SlowRank()
    returned = []
    for number in range(60):
        for _ in range(8):
            job.commit({SLOW: 4.0})
            found = [f for f in check.run(job.state, job.clock.now_ns) if f.rank == SLOW]
            now = {"now_ns": job.clock.now_ns, "now_unix_ns": job.clock.unix_ns}
            made = d.consider(job.state, [incident(SLOW, f"inc-{number}")] if found else [], **now)
            if made is not None:
                take(job, made)
                break
        if (made := run(d, job, 40)) is not None:
            returned.append(job.clock.now_ns / 1e9)
            take(job, made)
    gaps = [b - a for a, b in itertools.pairwise(returned)]
    assert len(returned) >= 3
    assert all(gap >= 60.0 * 2**n for n, gap in enumerate(gaps[:4]))


def test_return_that_brings_nothing_is_not_tried_again_soon(tmp_path: Path) -> None:
    """The judge undoes it; the same rank has to wait."""
    d, job = desk(tmp_path), gapped()
    relieve(d, job)
    run(d, job, 10, factor=4.0)
    made = run(d, job, 30)
    assert made is not None
    change = job.begin_change(made.plan, made.reason)
    job.state.changes[-1].end_ns = job.clock.advance(0.1)
    change.judged = "undone"
    d.undo(job.state, change, now_ns=job.clock.now_ns, now_unix_ns=job.clock.unix_ns)
    finding = Returns(LIMITS).due(job.state, job.clock.now_ns)
    assert finding is not None
    assert d.returns.due(job.state, job.clock.advance(500)) is None
