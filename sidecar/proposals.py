"""What the sidecar leaves for the job: a new plan, as a file that the job may take or ignore.

Nothing here waits for the job and the job waits for nothing here. One proposal at a time: none is
made while one is pending, while a change is judged, or in the cool-down after either. What the job
refused is shown with its incident and not proposed again from the same plan. Without `act` the plan
is worked out and shown with the incident, and no file is written.

A rank that was slow and is fast again gets its shares back in the same way, with the reason
RANK_RETURNED: it is back, with its speed. No critical incident may fire then.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path

from ntp_core.observe import Reason
from ntp_core.proposal import FILE_NAME, Proposal
from sidecar.advice import Planner, describe
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.state import Change, JobState
from sidecar.refusals import Refusal, refusals
from sidecar.returns import Returns

log = logging.getLogger(__name__)

MAX_PROMISES = 64
MAX_REFUSED = 64
_Step = tuple[str, str]  # digest of the plan in force, digest of the plan proposed


class Autopilot(StrEnum):
    """What is done with a new plan."""

    OFF = "off"
    ADVISE = "advise"
    ACT = "act"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProposalLimits:
    """When to propose.

    Attributes:
        cooldown_s: least time between the end of one proposal and the next.
        pending_s: how long a proposal waits for the job before it is withdrawn.
        undone_s: no proposal for a rank for this long after one for it brought nothing.
    """

    cooldown_s: float = 10.0
    pending_s: float = 60.0
    undone_s: float = 600.0


@dataclass(slots=True)
class ProposalDesk:
    """Makes proposals, remembers the pending one and what each promised."""

    run_dir: Path
    planner: Planner
    autopilot: Autopilot = Autopilot.ADVISE
    limits: ProposalLimits = field(default_factory=ProposalLimits)
    returns: Returns = field(default_factory=Returns)
    promises: dict[int, Proposal] = field(default_factory=dict)  # epoch -> what was proposed
    write_errors: int = 0
    _given: dict[int, int] = field(default_factory=dict)  # epoch -> rank that got shares back
    _pending: Proposal | None = None
    _pending_since_ns: int = 0
    _quiet_until_ns: int = 0
    _undone_until_ns: dict[int, int] = field(default_factory=dict)  # rank -> no proposal before
    _advice: dict[str, tuple[str, str]] = field(default_factory=dict)  # incident -> base, text
    _undo_refused: tuple[str, str] = ("", "")  # subject of the notice about the change, reason
    _refused: dict[_Step, str] | None = None  # -> reason, oldest first; None: not looked yet

    @property
    def pending(self) -> Proposal | None:
        """The proposal that lies in the run directory, if any."""
        return self._pending

    def consider(
        self, job: JobState, incidents: Iterable[Incident], *, now_ns: int, now_unix_ns: int
    ) -> Proposal | None:
        """Propose a plan for the first slow rank that fires, if the time is right for one.

        The proposal is shown in the signals of its incident. Returns what was newly proposed.
        """
        self._settle(job, now_ns)
        incidents = list(incidents)
        self._tell_refused_undo(incidents)
        slow = [i for i in incidents if _asks_for_a_plan(i)]
        for incident in slow:
            self._annotate(incident)
        if self.autopilot is Autopilot.OFF or not slow or job.plan is None:
            return None
        if self._pending or now_ns < self._quiet_until_ns or self._is_in_change(job):
            return None
        for incident in slow:
            if proposal := self._propose(job, incident, now_ns, now_unix_ns):
                return proposal
        return None

    def give_back(
        self, job: JobState, incidents: Sequence[Incident], *, now_ns: int, now_unix_ns: int
    ) -> Proposal | None:
        """Propose a plan by measured speeds when a rank carries less than it can. Only with `act`.

        Args:
            incidents: all that are known, oldest first; none that is critical may be firing.
        """
        if self.autopilot is not Autopilot.ACT or job.plan is None:
            return None
        if self._pending or now_ns < self._quiet_until_ns or self._is_in_change(job):
            return None
        finding = self.returns.due(job, now_ns)
        proposal = None if finding is None else self.planner(job, finding)
        if finding is None or finding.rank is None or proposal is None:
            return None
        if self._refusals().get(_step(proposal)) is not None:
            return None
        about = (finding.check, finding.rank)
        was = [i.id for i in incidents if (i.finding.check, i.finding.rank) == about]
        proposal = replace(
            proposal,
            reason=Reason.RANK_RETURNED,
            incident=was[-1] if was else "",
            detected_unix_ns=now_unix_ns,
            decided_unix_ns=now_unix_ns,
        )
        self.returns.given(finding.rank, now_ns)
        self._given[proposal.plan.epoch] = finding.rank
        self._leave(proposal, now_ns)
        return proposal

    def undo(self, job: JobState, change: Change, *, now_ns: int, now_unix_ns: int) -> None:
        """A change brought nothing: back to the plan before it, and do not try again soon."""
        promise = self.promises.get(change.epoch)
        if (rank := self._given.get(change.epoch)) is not None:
            self.returns.given(rank, now_ns, self.limits.undone_s)
            promise = None  # the others lost shares; that says nothing about them
        slow = None if promise is None else _rank_given_less(job, change)
        if slow is not None:
            self._undone_until_ns[slow] = now_ns + int(self.limits.undone_s * 1e9)
            # Once that time is over the same plan may be worth another try.
            self._advice.pop(change.incident or "", None)
        old = job.plans.get(change.old_digest)
        if self.autopilot is not Autopilot.ACT or old is None or job.plan is None:
            return
        if job.plan.digest != change.new_digest:
            return  # another change came in between; there is nothing left to undo
        self._leave(
            Proposal(
                base_digest=job.plan.digest,
                plan=old.with_epoch(job.plan.epoch + 1),
                reason=Reason.NO_GAIN,
                incident=change.incident or "",
                detected_unix_ns=now_unix_ns,
                decided_unix_ns=now_unix_ns,
            ),
            now_ns,
        )

    def _propose(
        self, job: JobState, incident: Incident, now_ns: int, now_unix_ns: int
    ) -> Proposal | None:
        rank, base = incident.finding.rank, job.plan.digest if job.plan else ""
        if rank is None or now_ns < self._undone_until_ns.get(rank, 0):
            return None
        if self._advice.get(incident.id, ("", ""))[0] == base:
            return None  # this plan was judged already
        proposal = self.planner(job, incident.finding)
        if proposal is None:
            self._advise(incident, base, "no plan is faster by enough")
            return None
        if (reason := self._refusals().get(_step(proposal))) is not None:
            self._advise(incident, base, _refused_text(proposal, reason))
            return None
        proposal = replace(
            proposal,
            incident=incident.id,
            detected_unix_ns=incident.opened_unix_ns,
            decided_unix_ns=now_unix_ns,
        )
        self._advise(incident, base, describe(proposal))
        if self.autopilot is Autopilot.ACT:
            self._leave(proposal, now_ns)
        return proposal

    def _refusals(self) -> dict[_Step, str]:
        """What was refused, at first also to an earlier sidecar of this job."""
        if self._refused is None:
            self._refused = {_step(r.proposal): r.reason for r in refusals(self.run_dir)}
        return self._refused

    def _note_refusal(self, refusal: Refusal) -> None:
        proposal = refusal.proposal
        known = self._refusals()
        known[_step(proposal)] = refusal.reason
        while len(known) > MAX_REFUSED:
            del known[next(iter(known))]
        text = _refused_text(proposal, refusal.reason)
        log.warning("proposal for epoch %s: %s", proposal.plan.epoch, text)
        if proposal.reason is Reason.NO_GAIN:
            self._undo_refused = (f"change {proposal.plan.epoch - 1}", text)
        elif proposal.incident:
            self._keep_advice(proposal.incident, proposal.base_digest, text)

    def _tell_refused_undo(self, incidents: Iterable[Incident]) -> None:
        """The judge says that a change is being undone; here that the job did not want it."""
        subject, text = self._undo_refused
        for incident in incidents:
            if subject and incident.finding.subject == subject:
                signals = {**incident.finding.signals, "undo": text}
                incident.finding = replace(incident.finding, signals=signals)

    def _find_refusal(self) -> Refusal | None:
        """The refusal of the pending proposal, once its file is no longer where we left it."""
        if self._pending is None or (self.run_dir / FILE_NAME).exists():
            return None
        return next((r for r in refusals(self.run_dir) if r.proposal == self._pending), None)

    def _leave(self, proposal: Proposal, now_ns: int) -> None:
        try:
            write_proposal(self.run_dir, proposal)
        except OSError:
            self.write_errors += 1
            self._quiet_until_ns = now_ns + int(self.limits.cooldown_s * 1e9)
            return
        self._pending, self._pending_since_ns = proposal, now_ns
        self.promises[proposal.plan.epoch] = proposal
        while len(self.promises) > MAX_PROMISES:
            del self.promises[min(self.promises)]
        self._given = {e: g for e, g in self._given.items() if e in self.promises}

    def _settle(self, job: JobState, now_ns: int) -> None:
        """See what became of the pending proposal: taken, overtaken, refused, or ignored."""
        if self._pending is None or job.plan is None:
            return
        gone_by = job.plan.epoch >= self._pending.plan.epoch
        ignored = now_ns - self._pending_since_ns >= self.limits.pending_s * 1e9
        refusal = None if gone_by else self._find_refusal()
        if refusal is not None and not refusal.reason and not ignored:
            return  # the reason comes in a moment
        if not gone_by and refusal is None and (not ignored or self._is_in_change(job)):
            return
        if job.plan.digest != self._pending.plan.digest:
            self.promises.pop(self._pending.plan.epoch, None)
            # Not tried, so the same plan may be proposed again after the cool-down.
            self._advice.pop(self._pending.incident, None)
        if refusal is not None:
            self._note_refusal(refusal)
        self._withdraw()
        self._quiet_until_ns = now_ns + int(self.limits.cooldown_s * 1e9)

    def _withdraw(self) -> None:
        self._pending = None
        (self.run_dir / FILE_NAME).unlink(missing_ok=True)

    def _is_in_change(self, job: JobState) -> bool:
        """A change runs, or a promise is not judged yet."""
        newest = job.changes[-1] if job.changes else None
        if newest is None:
            return False
        promise = self.promises.get(newest.epoch)
        is_open = promise is not None and promise.promised_step_s > 0 and newest.judged is None
        return newest.end_ns is None or is_open

    def _advise(self, incident: Incident, base: str, text: str) -> None:
        self._keep_advice(incident.id, base, text)
        self._annotate(incident)

    def _keep_advice(self, incident_id: str, base: str, text: str) -> None:
        self._advice[incident_id] = (base, text)
        while len(self._advice) > MAX_PROMISES:
            del self._advice[next(iter(self._advice))]

    def _annotate(self, incident: Incident) -> None:
        """Show the proposal with the incident; its finding is new in every tick."""
        if advice := self._advice.get(incident.id):
            signals = {**incident.finding.signals, "proposal": advice[1]}
            incident.finding = replace(incident.finding, signals=signals)


def _step(proposal: Proposal) -> _Step:
    return proposal.base_digest, proposal.plan.digest


def _refused_text(proposal: Proposal, reason: str) -> str:
    return f"refused by the job ({reason or 'no reason is left'}): {describe(proposal)}"


def _asks_for_a_plan(incident: Incident) -> bool:
    return (
        incident.finding.check == "slow_rank"
        and incident.state is IncidentState.FIRING
        and incident.finding.rank is not None
    )


def write_proposal(run_dir: Path, proposal: Proposal) -> Path:
    """Write it so that a reader sees all of it or nothing, for the job's user only."""
    path = run_dir / FILE_NAME
    temporary = run_dir / f".{FILE_NAME}.{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(proposal.to_json())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _rank_given_less(job: JobState, change: Change) -> int | None:
    """The rank whose share of its replica's units the change cut most."""
    old, new = job.plans.get(change.old_digest), job.plans.get(change.new_digest)
    if old is None or new is None:
        return None
    lost = {}
    for r_old, r_new in zip(old.replicas, new.replicas, strict=False):
        for index, rank in enumerate(r_old.ranks):
            if index < len(r_new.ranks) and r_new.ranks[index] == rank:
                lost[rank] = sum(
                    (v.shares[index] - r_new.layouts[k].shares[index]) / max(1, sum(v.shares))
                    for k, v in r_old.layouts.items()
                )
    worst = max(lost, key=lambda r: lost[r], default=None)
    return worst if worst is not None and lost[worst] > 0 else None
