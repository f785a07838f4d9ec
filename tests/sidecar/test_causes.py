"""Which incident a change answers: by who went and who came, and when."""

from __future__ import annotations

from ntp_core.observe import ChangeStatus, Reason
from sidecar.checks.finding import Finding, Severity
from sidecar.incidents.cause import causes
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.state import Change
from tests.support.clock import UNIX_OFFSET_NS
from tests.support.jobs import plan_of

SECOND = 1_000_000_000
ALL = plan_of(((8, 8, 8), (12, 12)))
WITHOUT_4 = plan_of(((8, 8, 8), (24,)), epoch=2)
WITHOUT_0_4 = plan_of(((12, 12), (24,)), epoch=3, ranks=(1, 2, 3))
PLANS = {p.digest: p for p in (ALL, WITHOUT_4, WITHOUT_0_4)}


def death(rank: int, at_s: float, resolved_s: float | None = None, check: str = "dead_rank"):
    """An incident about a rank."""
    finding = Finding(
        check=check,
        subject=f"rank {rank}",
        severity=Severity.CRITICAL,
        summary="It is gone.",
        rank=rank,
    )
    end = None if resolved_s is None else round(resolved_s * SECOND) + UNIX_OFFSET_NS
    return Incident(
        id=f"inc-{rank}-{at_s}",
        finding=finding,
        state=IncidentState.FIRING if end is None else IncidentState.RESOLVED,
        opened_unix_ns=round(at_s * SECOND) + UNIX_OFFSET_NS,
        opened_step=5,
        last_seen_unix_ns=1,
        resolved_unix_ns=end,
    )


def change(reason, old, new, at_s: float = 10.0, end_s: float | None = 11.0, failed=False):
    """A change between two plans; `new` may be a digest that nobody has announced."""
    return Change(
        epoch=2,
        reason=reason,
        step=5,
        old_digest=old.digest,
        new_digest=getattr(new, "digest", new),
        begin_ns=round(at_s * SECOND),
        end_ns=None if end_s is None else round(end_s * SECOND),
        status=ChangeStatus.FAILED if failed else ChangeStatus.COMMITTED,
    )


def ids(made: Change, *incidents: Incident) -> list[str]:
    """Of the incidents that it answers."""
    return [i.id for i in causes(made, incidents, PLANS, UNIX_OFFSET_NS)]


def test_death_is_answered_by_the_change_that_leaves_the_rank_out() -> None:
    """Not by one that keeps it, and not by one that came long after."""
    made = change(Reason.RANK_DIED, ALL, WITHOUT_4)
    of_4, of_0 = death(4, 9.9), death(0, 9.8)
    assert ids(made, of_0, of_4) == [of_4.id]
    assert ids(made, death(4, 2.0, resolved_s=3.0)) == []
    assert ids(made, death(4, 14.0)) == []


def test_death_seen_after_the_change_is_still_its_cause() -> None:
    """The job was faster than the sidecar's look."""
    seen_late = death(4, 11.5)
    assert ids(change(Reason.RANK_DIED, ALL, WITHOUT_4), seen_late) == [seen_late.id]


def test_stopped_rank_that_was_left_behind_is_a_cause_too() -> None:
    """Nothing died."""
    stuck = death(4, 9.0, check="no_progress")
    assert ids(change(Reason.RANK_DIED, ALL, WITHOUT_4), stuck) == [stuck.id]


def test_change_that_failed_is_of_who_died_before_it_not_in_it() -> None:
    """The next one answers both, the first of them first."""
    first, second = death(4, 9.9), death(0, 10.5)
    failed = change(Reason.RANK_DIED, ALL, "e" * 16, failed=True)
    assert ids(failed, first, second) == [first.id]
    assert ids(failed, death(4, 10.1), second) == ["inc-4-10.1"]
    done = change(Reason.RANK_DIED, ALL, WITHOUT_0_4, 11.0, 12.0)
    assert ids(done, first, second) == [first.id, second.id]


def test_return_is_tied_to_the_newest_death_of_the_rank_that_came() -> None:
    """Also when it is long over; a rank that is new to the job has none."""
    old, new, other = death(4, 1.0, 2.0), death(4, 5.0, 6.0), death(0, 5.0, 6.0)
    back = change(Reason.RANK_RETURNED, WITHOUT_4, ALL)
    assert ids(back, old, new, other) == [new.id]
    assert ids(back, other) == []
