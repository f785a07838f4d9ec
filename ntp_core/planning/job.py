"""The plan of a whole job: one pure function from what is known to who does what.

Two levels, each an exact min-max. Inside a replica the units go to ranks, one kind after the other
because tensor parallelism waits after each block: columns cannot repay an imbalance of heads. Over
replicas the sequences go to replicas by their time per sequence. Where a faster replica waits
anyway, it keeps the shares it has.

A change is worth its cost only if it saves enough: moving units stops the job for a while, and
measured speeds wander by some percent from window to window. So a new plan must save at least
`min_gain` of the step, or the present one stays; noise below it changes nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ntp_core.cost import Work
from ntp_core.errors import PlanError
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import RankCost, keep_placement
from ntp_core.planning.batch import batch_shares
from ntp_core.planning.held import Held, Layouts
from ntp_core.planning.members import Trial
from ntp_core.planning.memory import MemoryNeed
from ntp_core.planning.phases import Phase, phases_of_work
from ntp_core.planning.replica import Cut, RankState, Replica, ReplicaModel
from ntp_core.units import ModelUnits, UnitKind


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What a job plan may do and must respect.

    Attributes:
        need: bytes per unit and rank; None where memory never binds.
        collective_s: seconds of all collectives per sequence in a replica, by number of members.
        may_drop: compare with fewer members in each replica, and leave slow ranks out.
        min_gain: least part of the step time that a change must save, in [0, 1).
    """

    need: MemoryNeed | None = None
    collective_s: Callable[[int], float] = field(default=lambda members: 0.0)
    may_drop: bool = False
    min_gain: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a plan should take, with given speeds.

    Attributes:
        step_s: the ranks' own work per step, each waiting for the slowest after each block, and
            the collectives inside the replicas.
        ideal_s: the same if units and batch could be cut into any fraction.
        rank_s: global rank -> its own time per step, without waiting.
    """

    step_s: float
    ideal_s: float
    rank_s: Mapping[int, float] = field(default_factory=dict)

    @property
    def efficiency(self) -> float:
        """Ideal over predicted time, in (0, 1]."""
        return self.ideal_s / self.step_s if self.step_s else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A plan, what it promises, and why.

    Attributes:
        plan: under the epoch after the present one.
        prediction: of the plan.
        before: of the present plan; None where there is none, or where it names other ranks.
        is_kept: whether the present allocation stays, as nothing worth a change was found.
        moved: kind -> units (of each layer) that get to a rank that did not hold them.
        left_out: ranks that the job is faster without.
        trials: replica -> what other numbers of members would bring, where they were compared.
        gap: how much faster shares could be at most where memory binds; 0 when they are optimal.
    """

    plan: Plan
    prediction: Prediction
    before: Prediction | None
    is_kept: bool
    moved: Mapping[UnitKind, int]
    left_out: tuple[int, ...]
    trials: tuple[tuple[Trial, ...], ...]
    gap: float

    @property
    def explanation(self) -> str:
        """One line for people."""
        p = self.prediction
        text = f"step {p.step_s:.3g} s, {100 * p.efficiency:.1f} % of the ideal speed"
        if self.is_kept:
            return f"kept: {text}; nothing worth a change"
        if self.before is not None:
            text += f", before {self.before.step_s:.3g} s"
        busiest = max(p.rank_s, key=lambda g: p.rank_s[g])
        parts = [text, f"busiest rank {busiest}"]
        parts += [f"without {_named(self.left_out)}"] if self.left_out else []
        parts += [f"moves {sum(self.moved.values())} units"] if any(self.moved.values()) else []
        parts += [f"memory binds, at most {100 * self.gap:.1f} % from the best"] if self.gap else []
        return "; ".join(parts)


def plan_job(
    model: ModelUnits,
    work: Work | Sequence[Phase],
    replicas: Sequence[Sequence[RankState]],
    global_batch: int,
    present: Plan | None = None,
    options: PlanOptions | None = None,
) -> JobPlan:
    """The fastest plan found for these ranks, and what it promises.

    Args:
        model: its units.
        work: what one sequence asks for: operations alone, or phases with operations and bytes.
        replicas: ranks of each replica in tp_rank order. Dead ranks are left out by the caller.
        global_batch: sequences per step over all replicas; it stays whatever the plan.
        present: the plan in force; ranks keep what they can of their units under it.

    Raises:
        ModelMismatch: when the present plan is made for other units.
        PlanError: when units do not fit memory, or there are fewer sequences than replicas.
    """
    options = options or PlanOptions()
    phases = phases_of_work(work) if isinstance(work, Work) else tuple(work)
    costs = ReplicaModel(
        counts=model.counts, phases=phases, need=options.need, collective_s=options.collective_s
    )
    if present is not None:
        present.check_model(model)
    if not all(replicas):
        raise PlanError("a replica without ranks; leave it out of the job")
    given = [costs.of(states) for states in replicas]
    now = Held(present)
    held = [now.layouts(r.ranks) for r in given]
    cuts = [_cut(r, h, options.may_drop) for r, h in zip(given, held, strict=True)]
    batches = _batches(cuts, global_batch, None if present is None else now)
    made = _build(cuts, batches, held, given, 1 if present is None else present.epoch + 1)
    return made if present is None else _kept_if_as_good(made, present, given, options.min_gain)


def predict_plan(plan: Plan, replicas: Sequence[Replica]) -> Prediction:
    """What a plan should take. Overrides of single layers are not looked at.

    Args:
        replicas: costs of each replica's ranks, in the order of the plan.
    """
    step_s = sequences_per_s = 0.0
    rank_s: dict[int, float] = {}
    for r, replica in zip(plan.replicas, replicas, strict=True):
        shares = {k: v.shares for k, v in r.layouts.items()}
        step_s = max(step_s, r.batch * replica.sequence_s(shares))
        ideal_s = replica.ideal_s()
        sequences_per_s += 1 / ideal_s if ideal_s > 0 else math.inf
        own_s = replica.rank_s(shares)
        rank_s |= {g: r.batch * t for g, t in zip(r.ranks, own_s, strict=True)}
    return Prediction(step_s=step_s, ideal_s=plan.global_batch / sequences_per_s, rank_s=rank_s)


def _cut(replica: Replica, held: Layouts, may_drop: bool) -> Cut:
    shares = {k: v.shares for k, v in held.items()}
    return replica.cut_without_slow(shares) if may_drop else replica.cut(shares)


def _batches(cuts: Sequence[Cut], global_batch: int, now: Held | None) -> tuple[int, ...]:
    times = []
    for index, cut in enumerate(cuts):
        if cut.sequence_s <= 0:
            raise PlanError(f"replica {index} would do no work at all; give its units some work")
        times.append(RankCost(unit_s=cut.sequence_s))
    have = None if now is None else [now.batch(cut.replica.ranks) for cut in cuts]
    return batch_shares(global_batch, times, have)


def _build(
    cuts: Sequence[Cut],
    batches: Sequence[int],
    held: Sequence[Layouts],
    given: Sequence[Replica],
    epoch: int,
) -> JobPlan:
    step_s = max(n * cut.sequence_s for n, cut in zip(batches, cuts, strict=True))
    made: list[ReplicaPlan] = []
    moved: Counter[UnitKind] = Counter()
    for replica, layouts, cut, batch in zip(given, held, cuts, batches, strict=True):
        kept = {k: _of_members(v, replica.ranks, cut) for k, v in layouts.items()}
        new = _layouts(_within_slack(cut, kept, step_s / batch), kept)
        made.append(ReplicaPlan(ranks=cut.replica.ranks, layouts=new, batch=batch))
        moved.update({k: _gained(kept[k], new[k]) for k in kept})
    plan = Plan.build(dict(given[0].model.counts), made, epoch=epoch)
    return JobPlan(
        plan=plan,
        prediction=predict_plan(plan, [cut.replica for cut in cuts]),
        before=None,
        is_kept=False,
        moved=dict(moved),
        left_out=_missing(plan, given),
        trials=tuple(cut.trials for cut in cuts),
        gap=max(cut.gap for cut in cuts),
    )


def _missing(plan: Plan, given: Sequence[Replica]) -> tuple[int, ...]:
    return tuple(sorted({g for r in given for g in r.ranks}.difference(plan.ranks)))


def _of_members(layout: Layout, ranks: Sequence[int], cut: Cut) -> Layout:
    runs = dict(zip(ranks, layout.runs, strict=True))
    return Layout(tuple(runs[g] for g in cut.replica.ranks))


def _within_slack(cut: Cut, held: Layouts, limit_s: float) -> Cut:
    """Keep the present shares, of all kinds or of some, where the replica waits anyway."""
    counts = cut.replica.model.counts
    whole = {k: v.shares for k, v in held.items() if sum(v.shares) == counts[k]}
    for kinds in ([*whole], *([k] for k in whole)):
        shares = cut.shares | {k: whole[k] for k in kinds}
        is_new = shares != cut.shares
        if is_new and cut.replica.sequence_s(shares) <= limit_s and cut.replica.fits(shares):
            cut = replace(cut, shares=shares)
    return cut


def _layouts(cut: Cut, held: Layouts) -> Layouts:
    return {
        k: keep_placement(shares, held[k]) if k in held else Layout.contiguous(shares)
        for k, shares in cut.shares.items()
    }


def _gained(before: Layout, after: Layout) -> int:
    return sum(len(set(after.units(i)).difference(before.units(i))) for i in range(len(after.runs)))


def _kept_if_as_good(
    made: JobPlan, present: Plan, given: Sequence[Replica], min_gain: float
) -> JobPlan:
    """The present plan instead, where it can go on and the new one saves too little."""
    if not _can_go_on(present, given):
        return made
    members = [
        r.only([r.ranks.index(g) for g in old.ranks])
        for r, old in zip(given, present.replicas, strict=True)
    ]
    before = predict_plan(present, members)
    made = replace(made, before=before)
    fits = all(
        r.fits({k: v.shares for k, v in old.layouts.items()})
        for r, old in zip(members, present.replicas, strict=True)
    )
    must = not fits or present.global_batch != made.plan.global_batch
    is_worth_it = made.prediction.step_s < (1 - min_gain) * before.step_s
    if present.digest != made.plan.digest and (must or is_worth_it):
        return made
    return replace(
        made,
        plan=present.with_epoch(present.epoch + 1),
        prediction=before,
        is_kept=True,
        moved=dict.fromkeys(present.counts, 0),
        left_out=_missing(present, given),
        gap=0.0,
    )


def _can_go_on(present: Plan, given: Sequence[Replica]) -> bool:
    """Whether each replica of the present plan still has all its ranks, and no other is asked."""
    return len(given) == len(present.replicas) and all(
        not old.overrides and set(r.ranks).issuperset(old.ranks)
        for r, old in zip(given, present.replicas, strict=True)
    )


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
