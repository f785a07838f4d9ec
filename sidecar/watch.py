"""One job under watch: what happens in a tick after its records were read.

Checks look at the state, their findings become incidents, changes are judged, and a slow rank may
lead to a proposal. Time comes in as an argument; the only thing written is the proposal's file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ntp_core.cost import Work
from ntp_core.observe import ChangeStatus, Reason
from sidecar.advice import Planner, plan_for_slow_rank, work_by_weights
from sidecar.checks.finding import Check, Finding, Severity
from sidecar.checks.registry import build_checks
from sidecar.config import Config
from sidecar.incidents.incident import Incident
from sidecar.incidents.tracker import IncidentTracker, Transition
from sidecar.ingest.spans import trace_id_of
from sidecar.ingest.state import Change, JobState
from sidecar.judge import ChangeJudge, JudgeLimits
from sidecar.proposals import Autopilot, ProposalDesk, ProposalLimits
from sidecar.refusals import RefusedCount
from sidecar.returns import ReturnLimits, Returns
from sidecar.stops import StopKiller
from sidecar.view import CheckRow
from sidecar.wire.rundir import read_plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticked:
    """What is new after a tick: incidents that fired or resolved, changes that ended."""

    transitions: list[Transition]
    ended: list[Change]


@dataclass(slots=True, kw_only=True)
class JobWatch:
    """State, checks and incidents of one job."""

    job: JobState
    checks: Sequence[Check]
    tracker: IncidentTracker
    desk: ProposalDesk
    judge: ChangeJudge
    refused: RefusedCount
    stops: StopKiller = field(default_factory=StopKiller)
    _runs: Counter[str] = field(default_factory=Counter)
    _failures: Counter[str] = field(default_factory=Counter)
    _ready: set[str] = field(default_factory=set)
    _ended: set[tuple[int, int]] = field(default_factory=set)  # epoch, begin

    @property
    def incidents(self) -> list[Incident]:
        """All incidents that are kept, oldest first."""
        return self.tracker.incidents

    def rows(self) -> list[CheckRow]:
        """The counters of each check."""
        return [
            CheckRow(
                name=c.name,
                ready=c.name in self._ready,
                applies=c.applies(self.job),
                runs=self._runs[c.name],
                failures=self._failures[c.name],
            )
            for c in self.checks
        ]

    def tick(self, *, now_ns: int, now_unix_ns: int) -> Ticked:
        """Judge the state as it is now."""
        self._note_first_loss()
        for change in self.job.changes:
            if change.trace_id is None:
                change.trace_id = trace_id_of(self.job.job_id, change)
        ended = self._newly_ended()
        self.stops.tick(self.job, now_ns)
        self.refused.look(now_ns)
        self.job.proposals_refused, self.job.refusal = self.refused.count, self.refused.newest
        findings = self._run_checks(now_ns)
        self._name_incidents()
        self._judge(now_ns, now_unix_ns)
        findings += self.judge.findings(self.job, now_ns)
        transitions = self.tracker.update(
            findings, now_unix_ns=now_unix_ns, step=self.job.step, judged=self._ready
        )
        self._note_kills()
        self.tracker.link(self.job.changes, self.job.plans, now_unix_ns - now_ns)
        # After the findings of this tick are in, because it writes its advice into them; before
        # anyone is told, so that the message holds it.
        firing = self.tracker.firing()
        self.desk.consider(self.job, firing, now_ns=now_ns, now_unix_ns=now_unix_ns)
        if all(i.finding.severity is not Severity.CRITICAL for i in firing):
            self.desk.give_back(self.job, self.incidents, now_ns=now_ns, now_unix_ns=now_unix_ns)
        return Ticked(transitions=transitions, ended=ended)

    def _run_checks(self, now_ns: int) -> list[Finding]:
        findings: list[Finding] = []
        for check in self.checks:
            if not check.ready(self.job):
                self._ready.discard(check.name)
                continue
            self._ready.add(check.name)
            found = check.run(self.job, now_ns)
            self._runs[check.name] += 1
            self._failures[check.name] += bool(found)
            findings += found
        return findings

    def _judge(self, now_ns: int, now_unix_ns: int) -> None:
        opened = {i.id: i.opened_step for i in self.incidents}
        undone = self.judge.judge(self.job, self.desk.promises, opened, now_ns=now_ns)
        for change in undone:
            self.desk.undo(self.job, change, now_ns=now_ns, now_unix_ns=now_unix_ns)

    def _name_incidents(self) -> None:
        """A change that follows a proposal belongs to the incident that the proposal names."""
        for change in self.job.changes:
            promise = self.desk.promises.get(change.epoch)
            if promise and promise.incident and promise.plan.digest == change.new_digest:
                change.incident = promise.incident

    def _note_kills(self) -> None:
        """Whom the sidecar killed shows in the trace of the change that answers it."""
        answers = (c for c in self.job.changes if c.reason is Reason.RANK_DIED)
        noted = {(k.rank, k.t_ns) for c in self.job.changes for k in c.kills}
        fresh = [k for k in self.job.kills if (k.rank, k.t_ns) not in noted]
        for change in answers if fresh else ():
            if change.status is not None and change.status is not ChangeStatus.COMMITTED:
                continue
            change.kills += [k for k in fresh if k.t_ns <= change.begin_ns]
            fresh = [k for k in fresh if k.t_ns > change.begin_ns]

    def _newly_ended(self) -> list[Change]:
        ended = {(c.epoch, c.begin_ns): c for c in self.job.changes if c.end_ns is not None}
        fresh = [ended[key] for key in ended if key not in self._ended]
        self._ended = set(ended)
        return fresh

    def _note_first_loss(self) -> None:
        """The first finite one: before its first loss is known, a job reports NaN."""
        if self.job.loss_first is None:
            knows = [r for r in self.job.ranks.values() if r.loss is not None]
            known = [s for r in knows for s in r.steps if math.isfinite(s.loss)]
            self.job.loss_first = min(known, key=lambda s: s.step).loss if known else None


@dataclass(slots=True)
class WorkFiles:
    """What each unit of the model costs, as the job wrote it beside its plan."""

    run_dir: Path
    _known: dict[str, Work] = field(default_factory=dict)  # of the newest plan only

    def __call__(self, job: JobState) -> Work | None:
        """From the file of the plan in force; where that says nothing, by the sizes of tensors."""
        if job.plan is None:
            return None
        digest = job.plan.digest
        if digest not in self._known:
            work = self._read(digest) or work_by_weights(job)
            if work is None or not work.unit.keys() >= job.plan.counts.keys():
                return None
            self._known = {digest: work}
        return self._known[digest]

    def _read(self, digest: str) -> Work | None:
        try:
            body = json.loads(read_plan(self.run_dir, digest))["work"]
            return Work.from_json(body)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None


def build_watch(
    config: Config,
    job: JobState,
    run_dir: Path,
    planner: Planner | None = None,
    checks: Sequence[Check] | None = None,
) -> JobWatch:
    """All parts of a watch, with the limits of the configuration."""
    if checks is None:
        checks = build_checks(config.slow_rank_limits(), config.progress_limits())
    return JobWatch(
        job=job,
        checks=checks,
        tracker=IncidentTracker(job.job_id, config.policies()),
        desk=ProposalDesk(
            run_dir,
            planner or plan_for_slow_rank(config.proposal_min_gain, WorkFiles(run_dir)),
            Autopilot(config.autopilot),
            ProposalLimits(
                cooldown_s=config.proposal_cooldown_s, pending_s=config.proposal_pending_s
            ),
            Returns(ReturnLimits(steps=config.proposal_return_steps)),
        ),
        refused=RefusedCount(run_dir),
        stops=StopKiller(config.kill_stopped),
        judge=ChangeJudge(
            JudgeLimits(
                skip=config.judge_skip_steps,
                steps=config.judge_steps,
                margin=config.judge_margin,
            )
        ),
    )
