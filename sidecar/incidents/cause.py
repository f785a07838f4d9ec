"""Which incidents a change answers. Pure: changes, incidents and plans in, incidents out.

A proposal names its incident. What the job does by itself is matched: the death of a rank to the
incident about that rank that was open when the change began, a return to the newest one about the
rank that came back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ntp_core.observe import Reason
from ntp_core.plan import Plan
from sidecar.incidents.incident import Incident
from sidecar.ingest.spans import start_ns
from sidecar.ingest.state import Change

LINK_STEPS = 8
"""A change that names no incident belongs to one that opened at most this many steps away."""
LATE_NS = 2_000_000_000
"""How long after the end of a change the sidecar may see the death that it answered."""

_CHECK_OF_REASON = {
    Reason.RANK_SLOW: "slow_rank",
    Reason.REPAIR: "replica_divergence",
}
_LOSS_CHECKS = ("dead_rank", "no_progress")  # a stopped rank is left behind like a dead one


def causes(
    change: Change, incidents: Sequence[Incident], plans: Mapping[str, Plan], unix_offset_ns: int
) -> list[Incident]:
    """Incidents that the change answers, the first of them first; empty when none is known.

    Args:
        incidents: oldest first.
        plans: digest -> plan, those that are known.
        unix_offset_ns: unix time minus the clock of changes.
    """
    if change.reason is Reason.RANK_DIED:
        return _of_deaths(change, incidents, plans, unix_offset_ns)
    if change.reason is Reason.RANK_RETURNED:
        return _of_returns(change, incidents, plans, unix_offset_ns)
    check = _CHECK_OF_REASON.get(change.reason)
    for incident in reversed(incidents):
        if incident.finding.check == check and not incident.change_epochs:
            near = abs(incident.opened_step - change.step) <= LINK_STEPS
            return [incident] if near else []
    return []


def _of_deaths(
    change: Change, incidents: Sequence[Incident], plans: Mapping[str, Plan], unix_offset_ns: int
) -> list[Incident]:
    """Of the ranks that the new plan left out; while that is not known, of those lost before."""
    old, new = plans.get(change.old_digest), plans.get(change.new_digest)
    begun = start_ns(change) + unix_offset_ns
    ended = None if change.end_ns is None else change.end_ns + unix_offset_ns
    found = []
    for i in incidents:
        rank, resolved = _rank_lost(i), i.resolved_unix_ns
        if rank is None or (old is not None and rank not in old.ranks):
            continue
        is_out = new is not None and rank not in new.ranks
        latest = None if ended is None else ended + (LATE_NS if is_out else 0)
        is_in_time = latest is None or i.opened_unix_ns <= latest
        if is_in_time and (resolved is None or resolved >= begun):
            found.append((i, is_out))
    if any(is_out for _, is_out in found):
        return [i for i, is_out in found if is_out]
    # A change that came to nothing: who died before it began, not who died in it.
    before = [i for i, _ in found if i.opened_unix_ns <= change.begin_ns + unix_offset_ns]
    return before or [i for i, _ in found[:1]]


def _of_returns(
    change: Change, incidents: Sequence[Incident], plans: Mapping[str, Plan], unix_offset_ns: int
) -> list[Incident]:
    old, new = plans.get(change.old_digest), plans.get(change.new_digest)
    if old is None or new is None:
        return []
    begun, found = change.begin_ns + unix_offset_ns, []
    for rank in sorted(set(new.ranks) - set(old.ranks)):
        about = [i for i in incidents if _rank_lost(i) == rank and i.opened_unix_ns <= begun]
        found += about[-1:]
    return found


def _rank_lost(incident: Incident) -> int | None:
    finding = incident.finding
    return finding.rank if finding.check in _LOSS_CHECKS else None
