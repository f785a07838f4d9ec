"""Puts together allocation changes from what several ranks say, in whatever order it arrives.

The rings of a job are drained one after the other, so one rank's end of a change may be seen before
another rank's begin. The result does not depend on that order: times are widened to the earliest
begin and the latest end, totals are the largest reported, the worst status wins.

A change that a death interrupts is ended by its survivors. Where none of those that began it is
left to do so it is ended here, so that nothing stays running for ever.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ntp_core.observe import ChangePhase, ChangeStatus, Reason
from sidecar.ingest.state import MAX_CHANGES, Change, JobState, PhaseSpan
from sidecar.wire.schema import Kind, Record, digest_from_int

MAX_SPANS = 16384  # spans kept of one change: 9 phases on 2,048 ranks
MAX_NAMED = 8  # ranks named in the reason of an end
SETTLE_NS = 1_000_000_000
"""Time without a word of a change that nobody is left to end, before it is ended here: the last
records of its ranks may be on the way."""
MAX_EARLY = 4096  # records kept that arrived before any rank's begin of their change


@dataclass(slots=True)
class _Reports:
    """Which ranks have said what about one change."""

    change: Change
    begun: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    spans: set[tuple[int, int, int]] = field(default_factory=set)


class ChangeBook:
    """All changes of one job. Bounded: the oldest change goes when there are `MAX_CHANGES`."""

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._reports: list[_Reports] = []
        self._early: list[tuple[int, Record]] = []

    def begin(self, rank: int, r: Record) -> None:
        """CHANGE_BEGIN of one rank. Raises ValueError for a reason that does not exist."""
        reason = Reason(r.code)
        reports = self._of_begin(rank, r) or self._open(rank, r, reason)
        reports.begun.add(rank)
        change = reports.change
        change.begin_ns = min(change.begin_ns, r.t_ns)
        if rank <= change.driver:
            change.driver, change.reason, change.step = rank, reason, r.a
        early, self._early = self._early, []
        for other, record in early:
            self._late(other, record)

    def _open(self, rank: int, r: Record, reason: Reason) -> _Reports:
        change = Change(
            epoch=r.aux,
            reason=reason,
            step=r.a,
            old_digest=digest_from_int(r.b),
            new_digest=digest_from_int(r.c),
            begin_ns=r.t_ns,
            driver=rank,
        )
        self._job.changes.append(change)
        self._reports.append(_Reports(change))
        if len(self._reports) > MAX_CHANGES:
            del self._reports[0]
            del self._job.changes[0]
        return self._reports[-1]

    def phase(self, rank: int, r: Record) -> None:
        """CHANGE_PHASE of one rank. Raises ValueError for a phase that does not exist."""
        ChangePhase(r.code)
        self._late(rank, r)

    def end(self, rank: int, r: Record) -> None:
        """CHANGE_END of one rank. Raises ValueError for a status that does not exist."""
        ChangeStatus(r.code)
        self._late(rank, r)

    def close_abandoned(self, now_ns: int) -> None:
        """End, as failed, each change of which every rank has died or gone on to something else."""
        for reports in self._reports:
            change = reports.change
            if change.end_ns is not None:
                continue
            dead = sorted(g for g in reports.begun if self._is_gone(g, change))
            heard_ns = self._last_word(reports, dead)
            is_over = all(g in dead or self._has_gone_on(g, change) for g in reports.begun)
            if is_over and now_ns - heard_ns >= SETTLE_NS:
                change.end_ns, change.status = heard_ns, ChangeStatus.FAILED
                change.error = _why(dead)

    def _is_gone(self, rank: int, change: Change) -> bool:
        """The process that was in it is dead, or another one has its place."""
        state = self._job.ranks.get(rank)
        return state is None or state.alive is False or state.start_ns > change.begin_ns

    def _has_gone_on(self, rank: int, change: Change) -> bool:
        plan = self._job.plan
        if plan is not None and plan.epoch > change.epoch:
            return True
        return any(rank in r.begun and r.change.begin_ns > change.begin_ns for r in self._reports)

    def _last_word(self, reports: _Reports, dead: list[int]) -> int:
        """When the change was last heard of: by its own records, or by what its dead wrote last."""
        change = reports.change
        known = [change.begin_ns, *(s.end_ns for s in change.spans)]
        states = [self._job.ranks[g] for g in dead if g in self._job.ranks]
        known += [s.last_progress_ns for s in states if s.start_ns <= change.begin_ns]
        return max(known)

    def _late(self, rank: int, r: Record) -> None:
        """A record that needs its change's begin; kept aside until that has come."""
        reports = self._of_rank(rank, r.aux)
        if reports is None:
            if len(self._early) < MAX_EARLY:
                self._early.append((rank, r))
        elif r.kind == Kind.CHANGE_PHASE:
            _add_span(reports, rank, r)
        else:
            _add_end(reports, rank, r)

    def _of_epoch(self, epoch: int) -> list[_Reports]:
        return [r for r in self._reports if r.change.epoch == epoch]

    def _of_begin(self, rank: int, r: Record) -> _Reports | None:
        """The change that this begin belongs to; None when it opens one.

        An epoch that was rolled back may be tried again: what began after a change had ended is
        another change.
        """
        for reports in self._of_epoch(r.aux):
            end_ns = reports.change.end_ns
            if rank not in reports.begun and (end_ns is None or r.t_ns <= end_ns):
                return reports
        return None

    def _of_rank(self, rank: int, epoch: int) -> _Reports | None:
        """The change of this epoch that the rank is in: begun and not ended if there is one."""
        candidates = self._of_epoch(epoch)
        is_open = [r for r in candidates if rank in r.begun and rank not in r.ended]
        not_ended = [r for r in candidates if rank not in r.ended]
        for choice in (is_open, not_ended, candidates):
            if choice:
                return choice[-1]
        return None


def _add_span(reports: _Reports, rank: int, r: Record) -> None:
    key = (rank, r.code, r.a)
    change = reports.change
    if key in reports.spans or len(change.spans) >= MAX_SPANS:
        return
    reports.spans.add(key)
    change.begin_ns = min(change.begin_ns, r.a)
    change.spans.append(
        PhaseSpan(rank=rank, phase=ChangePhase(r.code), begin_ns=r.a, end_ns=r.b, num_bytes=r.c)
    )


def _add_end(reports: _Reports, rank: int, r: Record) -> None:
    reports.ended.add(rank)
    change = reports.change
    status = ChangeStatus(r.code)
    if change.error:  # it was given up too early: a rank knows better
        change.error, change.status, change.end_ns = "", None, None
    change.status = status if change.status is None else max(change.status, status)
    change.end_ns = r.t_ns if change.end_ns is None else max(change.end_ns, r.t_ns)
    change.bytes_moved = max(change.bytes_moved, r.a)
    change.bytes_lower_bound = max(change.bytes_lower_bound, r.b)
    change.units_verified = max(change.units_verified, r.c)


def _why(dead: list[int]) -> str:
    names = ", ".join(map(str, dead[:MAX_NAMED]))
    more = f" and {len(dead) - MAX_NAMED} more" if len(dead) > MAX_NAMED else ""
    if not dead:
        return "given up by its ranks without a word; ended by the sidecar"
    return f"rank{'s' if len(dead) > 1 else ''} {names}{more} died in it; ended by the sidecar"
