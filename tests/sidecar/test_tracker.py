"""Findings become incidents: confirmed, told once, resolved, armed again."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from ntp_core.observe import Reason
from sidecar.checks.finding import Finding, Severity
from sidecar.incidents.incident import IncidentState
from sidecar.incidents.tracker import MAX_INCIDENTS, IncidentTracker, Policy, Transition
from sidecar.ingest.state import Change
from tests.support.clock import UNIX_OFFSET_NS, FakeClock

POLICIES = {
    "slow_rank": Policy(confirm=3, clear_s=2.0),
    "replica_divergence": Policy(confirm=1, clear_s=1.0),
    "dead_rank": Policy(confirm=1, clear_s=1.0),
}


def finding(check: str = "slow_rank", subject: str = "rank 1", step: int | None = 7) -> Finding:
    """A finding with the least in it."""
    return Finding(
        check=check, subject=subject, severity=Severity.WARNING, summary="It is.", step=step
    )


class Harness:
    """A tracker on a fake clock; each tick is 0.1 s."""

    def __init__(self, policies: dict[str, Policy] | None = None) -> None:
        self.clock = FakeClock()
        self.tracker = IncidentTracker("job", POLICIES if policies is None else policies)

    def tick(self, *findings: Finding, judged: set[str] | None = None) -> list[Transition]:
        self.clock.advance(0.1)
        return self.tracker.update(findings, now_unix_ns=self.clock.unix_ns, step=9, judged=judged)

    def ticks(self, count: int, *findings: Finding) -> list[Transition]:
        return [t for _ in range(count) for t in self.tick(*findings)]


def test_tracker_fires_after_confirmation_once() -> None:
    """Pending for two ticks, fired at the third, silent after it."""
    h = Harness()
    assert h.ticks(2, finding()) == []
    assert h.tracker.incidents[0].state is IncidentState.PENDING
    (fired,) = h.tick(finding())
    assert fired.state is IncidentState.FIRING
    assert fired.incident.opened_step == 7
    assert h.ticks(50, finding()) == []
    assert h.tracker.fired_total == {("slow_rank", "warning"): 1}


def test_tracker_divergence_fires_at_once() -> None:
    """No confirmation where none is configured."""
    assert len(Harness().tick(finding("replica_divergence", "replicas"))) == 1


def test_tracker_unconfirmed_finding_vanishes_without_a_word() -> None:
    """Noise leaves no incident behind."""
    h = Harness()
    h.ticks(2, finding())
    assert h.tick() == []
    assert h.tracker.incidents == []


def test_tracker_resolves_after_clear_time_and_arms_again_with_a_new_id() -> None:
    """A second incident of the same subject is a new one."""
    h = Harness()
    h.ticks(3, finding())
    assert h.ticks(19) == []
    assert [t.state for t in h.ticks(3)] == [IncidentState.RESOLVED]
    h.ticks(3, finding())
    first, second = h.tracker.incidents
    assert (first.state, second.state) == (IncidentState.RESOLVED, IncidentState.FIRING)
    assert first.id != second.id
    assert first.resolved_unix_ns is not None


def test_tracker_short_gap_keeps_the_incident() -> None:
    """Absent for less than the clear time: the same incident, no message."""
    h = Harness()
    h.ticks(3, finding())
    for _ in range(5):
        assert h.ticks(10) == []
        assert h.ticks(2, finding()) == []
    assert len(h.tracker.incidents) == 1


def test_tracker_dedups_by_check_and_subject() -> None:
    """Two findings of one subject are one incident; another subject is another."""
    h = Harness()
    h.ticks(4, finding(), finding(subject="rank 2"), finding(step=8))
    assert len(h.tracker.incidents) == 2
    assert h.tracker.incidents[0].finding.step == 8, "the newest finding is kept"


def test_tracker_silence_of_a_check_that_cannot_judge_resolves_nothing() -> None:
    """Unknown is not healthy."""
    h = Harness()
    h.ticks(3, finding())
    for _ in range(100):
        assert h.tick(judged={"dead_rank"}) == []
    assert h.tracker.firing()
    assert any(h.tick(judged={"slow_rank"}) for _ in range(30))


def test_tracker_flapping_subject_is_held_longer_each_time() -> None:
    """After three firings in the window the clear time grows, so that pages stop."""
    h = Harness({"slow_rank": Policy(confirm=1, clear_s=1.0)})
    fired = sum(
        t.state is IncidentState.FIRING
        for _ in range(60)
        for t in [*h.ticks(2, finding()), *h.ticks(12)]
    )
    assert 3 <= fired <= 4


def test_tracker_list_is_bounded_and_drops_the_oldest_resolved() -> None:
    """256 are kept; what is open is never dropped, what does not fit is counted."""
    h = Harness({"slow_rank": Policy(confirm=1, clear_s=0.0)})
    h.tick(finding(subject="old"))
    h.ticks(1)
    for number in range(MAX_INCIDENTS):
        h.tick(*(finding(subject=f"rank {n}") for n in range(number + 1)))
    assert len(h.tracker.incidents) == MAX_INCIDENTS
    assert all(i.finding.subject != "old" for i in h.tracker.incidents)
    h.tick(*(finding(subject=f"rank {n}") for n in range(MAX_INCIDENTS + 5)))
    assert len(h.tracker.incidents) == MAX_INCIDENTS
    assert h.tracker.refused == 5


def test_tracker_ids_differ_between_sidecars_of_one_job() -> None:
    """A sidecar that starts again must not reuse an id that a receiver knows."""
    one, two = Harness(), Harness()
    two.clock.advance(5)
    one.ticks(3, finding())
    two.ticks(3, finding())
    assert one.tracker.incidents[0].id != two.tracker.incidents[0].id


def change(
    epoch: int, reason: Reason, step: int, incident: str | None = None, at_ns: int = 1
) -> Change:
    """A change with the least in it."""
    return Change(
        epoch=epoch,
        reason=reason,
        step=step,
        old_digest="a" * 16,
        new_digest="b" * 16,
        begin_ns=at_ns,
        trace_id=f"{epoch:032x}",
        incident=incident,
    )


def test_tracker_links_the_change_that_names_its_incident() -> None:
    """By the id that the proposal carried."""
    h = Harness()
    h.ticks(3, finding())
    incident = h.tracker.incidents[0]
    h.tracker.link([change(4, Reason.RANK_SLOW, 99, incident.id)])
    assert incident.change_epochs == [4]
    assert incident.trace_ids == [f"{4:032x}"]


def test_tracker_links_a_recovery_to_the_death_before_it() -> None:
    """The job recovers by itself: reason and time tell which incident it answers."""
    h = Harness()
    h.tick(replace(finding("dead_rank", "rank 3", step=7), rank=3))
    near = change(2, Reason.RANK_DIED, 8, at_ns=h.clock.now_ns)
    h.ticks(20)
    h.clock.advance(10)
    far = change(3, Reason.RANK_DIED, 700, at_ns=h.clock.now_ns)
    for _ in range(2):
        h.tracker.link([near, far], unix_offset_ns=UNIX_OFFSET_NS)
    assert h.tracker.incidents[0].change_epochs == [2]
    assert near.incident == h.tracker.incidents[0].id
    assert far.incident is None


def test_tracker_does_not_link_what_nothing_asked_for() -> None:
    """An operator's change belongs to no incident."""
    h = Harness()
    h.ticks(3, finding())
    plain = change(2, Reason.OPERATOR, 7)
    h.tracker.link([plain])
    assert plain.incident is None


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sets(st.sampled_from(["rank 0", "rank 1", "rank 2"])), max_size=120))
def test_tracker_every_firing_is_resolved_before_the_next(ticks: list[set[str]]) -> None:
    """In any history transitions of a subject alternate: fired, resolved, fired, ..."""
    h = Harness({"slow_rank": Policy(confirm=2, clear_s=0.3)})
    told: dict[str, list[IncidentState]] = {}
    for subjects in ticks:
        for t in h.tick(*(finding(subject=s) for s in sorted(subjects))):
            told.setdefault(t.incident.finding.subject, []).append(t.state)
    for states in told.values():
        expected = [IncidentState.FIRING, IncidentState.RESOLVED] * len(states)
        assert states == expected[: len(states)]
    ids = [i.id for i in h.tracker.incidents]
    assert len(set(ids)) == len(ids)
