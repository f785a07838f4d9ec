"""A job state in which every metric of the catalog has something to say."""

from __future__ import annotations

from ntp_core.observe import ChangePhase, ChangeStatus, Op, Phase, Reason
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.units import UnitKind
from sidecar.checks.finding import Finding, Severity
from sidecar.export.selfstats import JobView, SidecarStats
from sidecar.incidents.incident import Incident, IncidentState
from sidecar.ingest.state import Change, JobState, OpTotals, PhaseSpan, RankState, StepSample
from sidecar.view import CheckRow

MS = 1_000_000
S = 1_000_000_000
START_NS = 100 * S
UNIX_NS = 1_700_000_000 * S  # unix time at START_NS
UNIX_OFFSET_NS = UNIX_NS - START_NS
NOW_NS = START_NS + 60 * S


def step(number: int, *, epoch: int = 2, ms: float = 80, busy_ms: float = 60) -> StepSample:
    """One step of 1000 tokens that ends `number` seconds after the start."""
    return StepSample(
        step=number,
        end_ns=START_NS + number * S,
        duration_ns=int(ms * MS),
        busy_ns=int(busy_ms * MS),
        tokens=1000,
        loss=2.5,
        epoch=epoch,
        work=0.2,
    )


def rank_state(rank: int, *, replica: int | None = 0, steps: int = 2, pid: int = 0) -> RankState:
    """A living rank that has done some of everything."""
    state = RankState(
        rank=rank,
        pid=pid or 4000 + rank,
        world_size=5,
        start_ns=START_NS,
        start_unix_ns=UNIX_NS,
        alive=True,
        epoch=2,
        replica=replica,
        tp_rank=rank % 3,
        work=0.2,
        last_progress_ns=NOW_NS - S // 2,
        loss=2.5,
        grad_norm=1.25,
        phase_ns_total={int(Phase.FORWARD): 30 * MS, int(Phase.BACKWARD): 50 * MS},
        ops={int(Op.ALL_REDUCE): OpTotals(count=7, num_bytes=4096, duration_ns=20 * MS)},
        gc_ns_total=3 * MS,
        events_total=900,
        events_lost=4,
        probe_cost_ns=5_000,
        probe_cost_events=10,
    )
    for number in range(1, steps + 1):
        add_step(state, step(number))
    return state


def add_step(state: RankState, sample: StepSample) -> None:
    """What ingest does with a committed step."""
    state.steps.append(sample)
    state.step = sample.step
    state.steps_total += 1
    state.tokens_total += sample.tokens
    state.step_ns_total += sample.duration_ns
    state.busy_ns_total += sample.busy_ns


def change(*, epoch: int = 2, status: ChangeStatus | None = ChangeStatus.COMMITTED) -> Change:
    """A change over ranks 0, 1 and 2 that starts at second 10 and takes 0.4 s."""
    begin_ns = START_NS + 10 * S
    phases = {
        ChangePhase.DETECT: (-50, 0, {0: 0}),
        ChangePhase.DECIDE: (0, 10, {0: 0}),
        ChangePhase.QUIESCE: (10, 60, {0: 0, 1: 0, 2: 0}),
        ChangePhase.REGROUP: (60, 100, {0: 0, 1: 0, 2: 0}),
        ChangePhase.TRANSFER: (100, 300, {0: 600, 1: 300, 2: 100}),
        ChangePhase.VERIFY: (300, 390, {0: 0, 1: 0, 2: 0}),
        ChangePhase.RESUME: (390, 400, {0: 0, 1: 0, 2: 0}),
    }
    spans = [
        PhaseSpan(
            rank=rank,
            phase=phase,
            begin_ns=begin_ns + begin * MS + rank * MS,
            end_ns=begin_ns + end * MS + rank * MS,
            num_bytes=num_bytes,
        )
        for phase, (begin, end, ranks) in phases.items()
        for rank, num_bytes in ranks.items()
    ]
    return Change(
        epoch=epoch,
        reason=Reason.RANK_SLOW,
        step=9,
        old_digest="a" * 16,
        new_digest="b" * 16,
        begin_ns=begin_ns,
        end_ns=None if status is None else begin_ns + 400 * MS,
        status=status,
        bytes_moved=1000,
        bytes_lower_bound=1000,
        units_verified=700,
        spans=spans,
        incident="inc-1",
    )


def incident(
    state: IncidentState = IncidentState.FIRING,
    *,
    number: int = 1,
    severity: Severity = Severity.WARNING,
) -> Incident:
    """An incident about rank 1."""
    return Incident(
        id=f"inc-{number}",
        finding=Finding(
            check="slow_rank",
            subject="rank 1",
            severity=severity,
            summary="Rank 1 needs 3.1 times as long for its share as its peers for theirs.",
            signals={"slowness": "3.1x", "busy": "0.28 s"},
            rank=1,
            replica=0,
            step=19,
        ),
        state=state,
        opened_unix_ns=UNIX_NS + 9 * S,
        opened_step=19,
        last_seen_unix_ns=UNIX_NS + 12 * S,
        fired_unix_ns=None if state is IncidentState.PENDING else UNIX_NS + 10 * S,
        resolved_unix_ns=UNIX_NS + 20 * S if state is IncidentState.RESOLVED else None,
    )


def plan() -> Plan:
    """Two replicas, of 3 ranks and of 2."""
    layouts = [(4, 1, 3), (4, 4)]
    ranks = [(0, 1, 2), (3, 4)]
    replicas = [
        ReplicaPlan(ranks=r, layouts={UnitKind.MLP: Layout.contiguous(shares)}, batch=2 + len(r))
        for r, shares in zip(ranks, layouts, strict=True)
    ]
    return Plan.build({UnitKind.MLP: 8}, replicas, epoch=2)


def filled_job(job_id: str = "demo-1") -> JobState:
    """Five living ranks in two replicas, one change behind them."""
    ranks = {rank: rank_state(rank, replica=0 if rank < 3 else 1) for rank in range(5)}
    job = JobState(job_id=job_id, ranks=ranks, plan=plan(), changes=[change()])
    job.checked_steps, job.identical_steps = 40, 39
    return job


def filled_view(job_id: str = "demo-1") -> JobView:
    """The job with an incident and a check."""
    return JobView(
        job=filled_job(job_id),
        incidents=[incident()],
        checks=[CheckRow(name="slow_rank", ready=True, runs=812, failures=40)],
    )


def filled_stats() -> SidecarStats:
    """The sidecar's own numbers, all known."""
    return SidecarStats(
        tick_s=0.002,
        last_tick_unix_s=1.7e9,
        tick_errors=1,
        cpu_s=12.5,
        resident_memory_bytes=90_000_000,
        bad_rings=2,
        bad_records=6,
        webhooks_delivered=5,
        webhooks_retried=3,
        webhooks_dead=1,
        webhooks_dropped=1,
        outlet_errors={"webhook": 1},
        webhooks_queued=2,
    )
