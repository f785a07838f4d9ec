"""A realistic job for tests of everything that reads state: five ranks, TP 3 beside TP 2.

Rank 1 runs at a third of the speed. The change of epoch 2 gave it less work, so the step time fell,
but the rank is still slow and its incident still fires; an older incident is resolved.
"""

from __future__ import annotations

from ntp_core.observe import ChangePhase, ChangeStatus, Op, Reason
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.units import UnitKind
from sidecar.checks.finding import Finding, Severity
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.state import (
    Change,
    JobState,
    OpenCollective,
    PhaseSpan,
    RankState,
    StepSample,
)
from sidecar.view import CheckRow, snapshot_view

SECOND_NS = 1_000_000_000
NOW_NS = 1_000 * SECOND_NS
UNIX_OFFSET_NS = 1_760_000_000 * SECOND_NS
SLOW_RANK = 1
CHANGE_STEP = 23
STEPS = 41
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
COUNTS = {UnitKind.ATTENTION: 6, UnitKind.MLP: 24, UnitKind.VOCAB: 8}

_EVEN_MS, _UNEVEN_MS = 800, 410
_WORK_EVEN = (0.20, 0.20, 0.20, 0.20, 0.20)
_WORK_UNEVEN = (0.27, 0.08, 0.25, 0.20, 0.20)


def sample_plans() -> tuple[Plan, Plan]:
    """The even plan of epoch 1 and the plan of epoch 2 that spares rank 1."""
    even = _plan(1, ((2, 2, 2), (8, 8, 8), (3, 3, 2)))
    uneven = _plan(2, ((3, 1, 2), (11, 2, 11), (4, 0, 4)))
    return even, uneven


def _plan(epoch: int, first: tuple[tuple[int, ...], ...]) -> Plan:
    second = ((3, 3), (12, 12), (4, 4))
    kinds = tuple(COUNTS)
    return Plan.build(
        COUNTS,
        [
            ReplicaPlan(
                ranks=(0, 1, 2),
                batch=6,
                layouts={k: Layout.contiguous(s) for k, s in zip(kinds, first, strict=True)},
            ),
            ReplicaPlan(
                ranks=(3, 4),
                batch=4,
                layouts={k: Layout.contiguous(s) for k, s in zip(kinds, second, strict=True)},
            ),
        ],
        epoch=epoch,
    )


def sample_job(steps: int = STEPS) -> JobState:
    """The job after `steps` steps; the change comes after step 23."""
    even, uneven = sample_plans()
    job = JobState(job_id="demo-1", plan=uneven if steps > CHANGE_STEP else even)
    job.plans = {even.digest: even, uneven.digest: uneven}
    for rank in range(5):
        job.ranks[rank] = _rank(rank, steps, job.plan or even)
    if steps > CHANGE_STEP:
        job.changes.append(_change(even, uneven))
    job.identical_steps = job.checked_steps = steps
    job.loss_first = _loss(1) if steps else None
    return job


def _rank(rank: int, steps: int, plan: Plan) -> RankState:
    replica, tp_rank = plan.place(rank)
    work = _WORK_UNEVEN if plan.epoch == 2 else _WORK_EVEN
    state = RankState(
        rank=rank,
        pid=4200 + rank,
        world_size=5,
        start_ns=NOW_NS - 60 * SECOND_NS,
        start_unix_ns=NOW_NS + UNIX_OFFSET_NS - 60 * SECOND_NS,
        alive=True,
        epoch=plan.epoch,
        replica=replica,
        tp_rank=tp_rank,
        work=work[rank],
        step=steps,
        last_progress_ns=NOW_NS - SECOND_NS // 5,
        loss=_loss(steps),
        grad_norm=1.2,
        steps_total=steps,
        events_total=1000 * steps + rank,
        events_lost=12 if rank == 4 else 0,
    )
    state.steps.extend(_step(rank, n) for n in range(1, steps + 1))
    if rank != SLOW_RANK:
        state.collective = OpenCollective(
            op=Op.ALL_REDUCE, group=3, seq=901, num_bytes=4096, begin_ns=NOW_NS - SECOND_NS // 10
        )
    return state


def _loss(step: int) -> float:
    return 2.0 + 3.5 * 0.95**step


def _step_ms(step: int) -> int:
    """Step time with a little unevenness that is the same in every run."""
    return (_EVEN_MS if step <= CHANGE_STEP else _UNEVEN_MS) + step * 7 % 23


def _step(rank: int, step: int) -> StepSample:
    late = step > CHANGE_STEP
    work = (_WORK_UNEVEN if late else _WORK_EVEN)[rank]
    normal_ms = 1250 * work
    return StepSample(
        step=step,
        end_ns=NOW_NS - (STEPS - step) * SECOND_NS,
        duration_ns=_step_ms(step) * 1_000_000,
        busy_ns=round((3.1 if rank == SLOW_RANK else 1.0) * normal_ms * 1_000_000),
        tokens=768 if rank < 3 else 512,
        loss=_loss(step),
        epoch=2 if late else 1,
        work=work,
    )


_PHASES_MS = (
    (ChangePhase.DETECT, 0, 12),
    (ChangePhase.DECIDE, 12, 31),
    (ChangePhase.QUIESCE, 31, 74),
    (ChangePhase.REGROUP, 74, 118),
    (ChangePhase.TRANSFER, 118, 318),
    (ChangePhase.VERIFY, 318, 371),
    (ChangePhase.RESUME, 371, 410),
)
_TRANSFER = ((0, 190, 1_258_291), (1, 42, 0), (2, 165, 995_328), (3, 20, 0), (4, 18, 0))
"""Rank, milliseconds, bytes received."""


def _change(old: Plan, new: Plan) -> Change:
    begin_ns = NOW_NS - (STEPS - CHANGE_STEP) * SECOND_NS
    change = Change(
        epoch=2,
        reason=Reason.RANK_SLOW,
        step=CHANGE_STEP,
        old_digest=old.digest,
        new_digest=new.digest,
        begin_ns=begin_ns,
        end_ns=begin_ns + 410_000_000,
        status=ChangeStatus.COMMITTED,
        bytes_moved=2_253_619,
        bytes_lower_bound=2_253_619,
        units_verified=700,
        trace_id=TRACE_ID,
        incident="inc-2",
        step_time_before_s=0.812,
        step_time_after_s=0.418,
        step_time_ideal_s=0.40,
        judged="kept",
    )
    for phase, start_ms, stop_ms in _PHASES_MS:
        for rank, transfer_ms, num_bytes in _TRANSFER:
            transfer = phase is ChangePhase.TRANSFER
            stop = start_ms + transfer_ms if transfer and rank else stop_ms
            change.spans.append(
                PhaseSpan(
                    rank=rank,
                    phase=phase,
                    begin_ns=begin_ns + start_ms * 1_000_000,
                    end_ns=begin_ns + stop * 1_000_000,
                    num_bytes=num_bytes if transfer else 0,
                )
            )
    return change


def sample_incidents() -> list[Incident]:
    """A resolved hang and the slow rank that still fires."""
    now_unix_ns = NOW_NS + UNIX_OFFSET_NS
    stuck = Finding(
        check="no_progress",
        subject="rank 3",
        severity=Severity.CRITICAL,
        summary="Rank 3 never arrived at all_reduce 212 of group 3; 4 ranks wait for it.",
        signals={"step": "no commit for 6.2 s", "collective": "rank 3 is 1 behind"},
        rank=3,
        replica=1,
        step=9,
    )
    slow = Finding(
        check="slow_rank",
        subject="rank 1",
        severity=Severity.WARNING,
        summary="Rank 1 needs 3.1x the time of its peers for its share of the work.",
        signals={"slowness": "3.1x", "arrival": "last in 19 of 20 steps"},
        rank=SLOW_RANK,
        replica=0,
        step=STEPS,
    )
    return [
        Incident(
            id="inc-1",
            finding=stuck,
            state=IncidentState.RESOLVED,
            opened_unix_ns=now_unix_ns - 48 * SECOND_NS,
            opened_step=9,
            last_seen_unix_ns=now_unix_ns - 43 * SECOND_NS,
            fired_unix_ns=now_unix_ns - 47 * SECOND_NS,
            resolved_unix_ns=now_unix_ns - 41 * SECOND_NS,
        ),
        Incident(
            id="inc-2",
            finding=slow,
            state=IncidentState.FIRING,
            opened_unix_ns=now_unix_ns - 22 * SECOND_NS,
            opened_step=19,
            last_seen_unix_ns=now_unix_ns,
            fired_unix_ns=now_unix_ns - 20 * SECOND_NS,
            change_epochs=[2],
            trace_ids=[TRACE_ID],
        ),
    ]


def sample_checks() -> list[CheckRow]:
    """Counters of the four checks; one has too little data to judge."""
    return [
        CheckRow(name="slow_rank", ready=True, runs=812, failures=40),
        CheckRow(name="no_progress", ready=True, runs=812, failures=7),
        CheckRow(name="replica_divergence", ready=False, runs=0, failures=0),
        CheckRow(name="dead_rank", ready=True, runs=812, failures=0),
    ]


def sample_snapshot(steps: int = STEPS) -> dict[str, object]:
    """The whole sample as the API shows it."""
    return snapshot_view(
        sample_job(steps),
        sample_incidents(),
        sample_checks(),
        now_ns=NOW_NS,
        unix_offset_ns=UNIX_OFFSET_NS,
    )
