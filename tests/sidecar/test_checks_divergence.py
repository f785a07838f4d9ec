"""Replicas that differ are seen at the same step, and named when something tells which."""

from __future__ import annotations

from ntp_core.observe import Blame
from sidecar.catalog import CHECKS
from sidecar.checks.finding import Finding, Severity
from sidecar.checks.registry import build_checks
from sidecar.checks.replica_divergence import ReplicaDivergence
from sidecar.ingest.state import Divergence
from tests.support.jobs import DrivenJob, plan_of

EVEN = ((8, 8, 8), (12, 12), (24,))


def fingerprint(job: DrivenJob, step: int, *values: int) -> None:
    """Each replica's value at a step."""
    job.state.fingerprints[step] = dict(enumerate(values))
    job.state.checked_steps += 1
    job.state.identical_steps += len(set(values)) == 1


def verdict(
    step: int, blame: Blame, replica: int | None, rank: int | None, unit: int = 5
) -> Divergence:
    """The job's own word."""
    return Divergence(
        step=step, t_ns=0, blame=blame, replica=replica, rank=rank, tensor="up", unit=unit
    )


def look(check: ReplicaDivergence, job: DrivenJob, seconds: float = 0.0) -> list[Finding]:
    """Findings after some time."""
    return check.run(job.state, job.clock.advance(seconds))


def test_divergence_identical_no_finding() -> None:
    """Equal fingerprints at every step."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    assert not check.ready(job.state)
    for step in range(1, 30):
        fingerprint(job, step, step, step, step)
        assert check.ready(job.state)
        assert look(check, job) == []


def test_divergence_verdict_names_replica_rank_tensor_unit_at_once() -> None:
    """With the job's verdict nothing is waited for."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    fingerprint(job, 7, 1, 2, 1)
    job.state.divergences.append(verdict(7, Blame.MAJORITY, 1, 4))
    (finding,) = look(check, job)
    assert (finding.replica, finding.rank, finding.tensor, finding.unit) == (1, 4, "up", 5)
    assert (finding.severity, finding.step) == (Severity.CRITICAL, 7)
    assert "all other replicas agree" in finding.signals["evidence"]


def test_divergence_undecided_says_that_it_cannot_tell() -> None:
    """No evidence, no name."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    job.state.divergences.append(verdict(7, Blame.UNDECIDED, None, None))
    (finding,) = look(check, job)
    assert (finding.replica, finding.rank) == (None, None)
    assert "nothing tells which one is wrong" in finding.summary


def test_divergence_undecided_names_nobody_even_if_numbers_are_given() -> None:
    """A replica beside an undecided verdict is not blamed."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    job.state.divergences.append(verdict(7, Blame.UNDECIDED, 1, 4))
    (finding,) = look(check, job)
    assert (finding.replica, finding.rank) == (None, None)


def test_divergence_fingerprints_alone_wait_for_a_verdict_then_use_the_majority() -> None:
    """Half a second for the job's word; then two equal replicas speak against the third."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    fingerprint(job, 7, 1, 1, 2)
    assert look(check, job) == []
    (finding,) = look(check, job, 0.6)
    assert (finding.replica, finding.rank) == (2, None)


def test_divergence_two_replicas_alone_cannot_tell() -> None:
    """One against one is no majority."""
    job, check = DrivenJob(plan_of(EVEN[:2])), ReplicaDivergence()
    fingerprint(job, 7, 1, 2)
    look(check, job)
    (finding,) = look(check, job, 0.6)
    assert finding.replica is None


def test_divergence_goes_on_over_steps_as_one_subject() -> None:
    """Every new differing step is the same trouble."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    fingerprint(job, 7, 1, 1, 2)
    look(check, job)
    subjects = set()
    for step in range(8, 12):
        fingerprint(job, step, step, step, 0)
        subjects |= {f.subject for f in look(check, job, 0.6)}
    assert subjects == {"replicas"}


def test_divergence_resolved_by_a_later_identical_step() -> None:
    """The clear event: a later checked step is identical."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    fingerprint(job, 7, 1, 2, 1)
    job.state.divergences.append(verdict(7, Blame.AT_REST, 1, 4))
    assert look(check, job)
    fingerprint(job, 8, 3, 3, 3)
    assert look(check, job) == []


def test_divergence_repair_at_the_same_step_does_not_hide_it() -> None:
    """The job repaired before it went on, so the step's values are equal: told until the next."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    fingerprint(job, 6, 1, 1, 1)
    fingerprint(job, 7, 1, 1, 1)
    job.state.divergences.append(verdict(7, Blame.MAJORITY, 1, 4))
    assert look(check, job)
    fingerprint(job, 8, 3, 3, 3)
    assert look(check, job) == []


def test_divergence_half_reported_step_neither_proves_nor_blames() -> None:
    """A step that one replica has not reported yet resolves nothing and accuses nobody."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    fingerprint(job, 7, 1, 2, 1)
    job.state.divergences.append(verdict(7, Blame.MAJORITY, 1, 4))
    job.state.fingerprints[8] = {0: 5, 1: 5}
    assert look(check, job, 1.0)
    job.state.fingerprints[8][2] = 5
    assert look(check, job) == []


def test_divergence_replica_that_is_gone_has_no_say() -> None:
    """After a change to fewer replicas an old value of the third is not compared."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    fingerprint(job, 7, 1, 1, 9)
    job.install(plan_of(EVEN[:2], epoch=2))
    look(check, job)
    assert look(check, job, 1.0) == []


def test_divergence_counts_units_and_tensors() -> None:
    """The extent of the damage is a signal."""
    job, check = DrivenJob(plan_of(EVEN)), ReplicaDivergence()
    for unit in (3, 4, 5):
        job.state.divergences.append(verdict(9, Blame.MAJORITY, 1, 4, unit))
    (finding,) = look(check, job)
    assert finding.signals["extent"] == "units: 3, tensors: 1"


def test_registry_checks_are_those_of_the_catalog() -> None:
    """Same names, same order: exporters, alerts and docs follow the catalog."""
    assert [c.name for c in build_checks()] == [c.name for c in CHECKS]
