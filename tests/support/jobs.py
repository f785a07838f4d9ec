"""A job for tests of the checks: ranks commit steps with the busy times that a test names.

Unlike `sample_state`, which is one fixed job, this one is driven step by step on a fake clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ntp_core.observe import ChangeStatus, Op, Reason
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.units import ModelUnits, TensorSpec, UnitKind
from sidecar.ingest.state import Change, JobState, OpenCollective, RankState, StepSample
from tests.support.clock import UNIX_OFFSET_NS, FakeClock

UNITS = 24
MODEL = ModelUnits(
    counts={UnitKind.MLP: UNITS},
    tensors=(
        TensorSpec(name="up", shape=(UNITS * 4, 8), kind=UnitKind.MLP),
        TensorSpec(name="norm", shape=(8,)),
    ),
)


def plan_of(
    shares: Sequence[Sequence[int]],
    epoch: int = 1,
    batch: int = 4,
    ranks: Sequence[int] | None = None,
) -> Plan:
    """A plan with one replica for each row of MLP shares; its ranks are those given, in order, else
    numbered through."""
    names = range(sum(map(len, shares))) if ranks is None else ranks
    replicas, first = [], 0
    for row in shares:
        layouts = {UnitKind.MLP: Layout.contiguous(row)}
        own = tuple(names[first : first + len(row)])
        replicas.append(ReplicaPlan(ranks=own, layouts=layouts, batch=batch))
        first += len(row)
    return Plan.build({UnitKind.MLP: sum(shares[0])}, replicas, epoch=epoch)


def work_of(plan: Plan) -> dict[int, float]:
    """Each rank's share of the work: its units times its replica's batch, sum 1."""
    raw = {
        g: r.layouts[UnitKind.MLP].shares[i] * r.batch
        for r in plan.replicas
        for i, g in enumerate(r.ranks)
    }
    return {g: w / sum(raw.values()) for g, w in raw.items()}


class DrivenJob:
    """A job whose steps, collectives, changes and deaths a test drives.

    Attributes:
        state: what the checks see.
        clock: moves by the step time with every step.
        speed: seconds that all of a step's work would take on one rank.
    """

    def __init__(self, plan: Plan, clock: FakeClock | None = None, speed: float = 1.0) -> None:
        self.clock = clock or FakeClock()
        self.speed = speed
        self.state = JobState(job_id="driven", plan=plan, model=MODEL)
        self.step = 0
        for rank in plan.ranks:
            self.state.ranks[rank] = RankState(
                rank=rank,
                pid=5000 + rank,
                world_size=len(plan.ranks),
                start_ns=self.clock.now_ns,
                start_unix_ns=self.clock.unix_ns,
                alive=True,
                last_progress_ns=self.clock.now_ns,
            )
        self.install(plan)

    def install(self, plan: Plan) -> None:
        """Put a plan in force on all its ranks."""
        self.state.plan = plan
        self.state.plans[plan.digest] = plan
        work = work_of(plan)
        for rank in plan.ranks:
            state = self.state.ranks[rank]
            state.epoch, state.work = plan.epoch, work[rank]
            state.replica, state.tp_rank = plan.place(rank)

    def expect(self, slow: Mapping[int, float]) -> None:
        """The plan in force was made for these ranks being slower by a factor."""
        assert self.state.plan is not None
        times = {g: w * slow.get(g, 1.0) for g, w in work_of(self.state.plan).items()}
        for rank, time in times.items():
            self.state.ranks[rank].work = time / sum(times.values())

    def commit(
        self,
        slow: Mapping[int, float] | None = None,
        noise: Mapping[int, float] | None = None,
        queued: Mapping[int, float] | None = None,
    ) -> int:
        """One step of all living ranks: busy time = share * speed * slow * noise + queued.

        Args:
            queued: rank -> run-queue time as a multiple of its share * speed.
        """
        self.step += 1
        assert self.state.plan is not None
        share = work_of(self.state.plan)
        living = [r for r in self.state.ranks.values() if r.alive and r.rank in share]
        busy = {
            r.rank: share[r.rank]
            * self.speed
            * (slow or {}).get(r.rank, 1.0)
            * (noise or {}).get(r.rank, 1.0)
            for r in living
        }
        waits = {r: share[r] * self.speed * (queued or {}).get(r, 0.0) for r in busy}
        step_s = 1.02 * max(busy[r] + waits[r] for r in busy)
        self.clock.advance(step_s)
        for r in living:
            own_ns, queued_ns = (round(t[r.rank] * 1e9) for t in (busy, waits))
            self._commit_one(r, round(step_s * 1e9), own_ns + queued_ns, queued_ns)
        return self.step

    def _commit_one(self, rank: RankState, duration_ns: int, busy_ns: int, queued_ns: int) -> None:
        rank.step, rank.step_open, rank.collective = self.step, None, None
        rank.steps_total += 1
        rank.last_progress_ns = self.clock.now_ns
        rank.loss = 5.0 * 0.99**self.step
        rank.steps.append(
            StepSample(
                step=self.step,
                end_ns=self.clock.now_ns,
                duration_ns=duration_ns,
                busy_ns=busy_ns,
                tokens=64,
                loss=rank.loss,
                epoch=rank.epoch,
                work=rank.work,
                queued_ns=queued_ns,
            )
        )

    def change(self, plan: Plan, reason: Reason, seconds: float = 0.2) -> Change:
        """A committed change to `plan`."""
        change = self.begin_change(plan, reason)
        change.end_ns = self.clock.advance(seconds)
        change.status = ChangeStatus.COMMITTED
        change.units_verified = 2
        self.install(plan)
        return change

    def begin_change(self, plan: Plan, reason: Reason) -> Change:
        """A change that has begun and not ended."""
        old = self.state.plan
        assert old is not None
        change = Change(
            epoch=plan.epoch,
            reason=reason,
            step=self.step,
            old_digest=old.digest,
            new_digest=plan.digest,
            begin_ns=self.clock.now_ns,
        )
        self.state.changes.append(change)
        return change

    def enter(self, ranks: Sequence[int], seq: int, group: int = 1) -> None:
        """These ranks arrive at an all-reduce and wait in it."""
        for rank in ranks:
            self.state.ranks[rank].collective = OpenCollective(
                op=Op.ALL_REDUCE,
                group=group,
                seq=seq,
                num_bytes=4096,
                begin_ns=self.clock.now_ns,
            )
            self.state.ranks[rank].collective_seq = seq
            self.state.ranks[rank].last_progress_ns = self.clock.now_ns

    def begin_step(self) -> None:
        """All living ranks open the next step."""
        for rank in self.state.ranks.values():
            if rank.alive:
                rank.step_open = self.step + 1

    def kill(self, rank: int) -> None:
        """The process of a rank is gone without a goodbye."""
        self.state.ranks[rank].alive = False


__all__ = ["MODEL", "UNITS", "UNIX_OFFSET_NS", "DrivenJob", "plan_of", "work_of"]
