"""Shares inside one replica: time of a sequence, memory, and whether to go on without a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ntp_core.errors import PlanError
from ntp_core.planner import CompletionTime, ideal_time_s, max_time_s, min_max_shares
from ntp_core.planning.members import Trial
from ntp_core.planning.memory import MemoryNeed, RankMemory, shares_in_memory
from ntp_core.planning.phases import Phase, RankSpeed, kind_costs
from ntp_core.planning.search import Shares
from ntp_core.units import UnitKind

Costs = dict[UnitKind, list[CompletionTime]]
UnitShares = Mapping[UnitKind, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankState:
    """What is known of a rank.

    Attributes:
        rank: global rank.
        speed: measured.
        memory_bytes: what it can use; infinite where memory never binds.
        fixed_s: seconds per sequence that it needs whatever its share (launches, a slow host).
    """

    rank: int
    speed: RankSpeed
    memory_bytes: float = math.inf
    fixed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaModel:
    """What a sequence asks of any replica of a job.

    Attributes:
        counts: units of each kind.
        phases: what a sequence asks for.
        need: bytes per unit and rank; None where memory never binds.
        collective_s: seconds of all collectives per sequence, by number of members.
    """

    counts: Mapping[UnitKind, int]
    phases: tuple[Phase, ...]
    need: MemoryNeed | None = None
    collective_s: Callable[[int], float] = field(default=lambda members: 0.0)

    def of(self, states: Sequence[RankState]) -> Replica:
        """A replica of these ranks."""
        speeds, fixed_s = [m.speed for m in states], [m.fixed_s for m in states]
        costs = {k: kind_costs(k, self.counts, self.phases, speeds, fixed_s) for k in self.counts}
        return Replica(model=self, states=tuple(states), costs=costs)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Ranks that may share one copy of the model, and what units cost each.

    Attributes:
        states: its ranks in tp_rank order.
        costs: kind -> time of each rank.
    """

    model: ReplicaModel
    states: tuple[RankState, ...]
    costs: Costs

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks in tp_rank order."""
        return tuple(m.rank for m in self.states)

    def only(self, places: Sequence[int]) -> Replica:
        """The replica of some of its ranks."""
        return Replica(
            model=self.model,
            states=tuple(self.states[i] for i in places),
            costs={k: [c[i] for i in places] for k, c in self.costs.items()},
        )

    @property
    def collective_s(self) -> float:
        """Seconds of its collectives per sequence."""
        return self.model.collective_s(len(self.states))

    def work_s(self, shares: UnitShares) -> float:
        """Time of one sequence without collectives: for each kind that of its slowest rank."""
        return sum(
            max(c.time_s(n) for c, n in zip(self.costs[k], own, strict=True))
            for k, own in shares.items()
        )

    def sequence_s(self, shares: UnitShares) -> float:
        """Time of one sequence."""
        return self.work_s(shares) + self.collective_s

    def rank_s(self, shares: UnitShares) -> list[float]:
        """Own time of each rank per sequence, without waiting."""
        return [
            sum(self.costs[k][i].time_s(own[i]) for k, own in shares.items())
            for i in range(len(self.states))
        ]

    def ideal_s(self) -> float:
        """Time of one sequence if units could be cut into any fraction."""
        kinds = (ideal_time_s(n, self.costs[k]) for k, n in self.model.counts.items())
        return sum(kinds) + self.collective_s

    def fits(self, shares: UnitShares) -> bool:
        """Whether memory holds these shares."""
        need = self.model.need
        return need is None or all(
            need.rank + sum(need.unit.get(k, 0.0) * own[i] for k, own in shares.items())
            <= m.memory_bytes
            for i, m in enumerate(self.states)
        )

    def cut(self, present: UnitShares) -> Cut:
        """The fastest shares of all its ranks; ties keep the present ones.

        Raises:
            PlanError: when they do not fit memory.
        """
        need = self.model.need
        if need is None:
            return Cut(replica=self, shares=self._free_shares(present))
        ranks = [RankMemory(rank=m.rank, size_bytes=m.memory_bytes) for m in self.states]
        found = shares_in_memory(self.model.counts, self.costs, need, ranks, present)
        return Cut(replica=self, shares=found.shares, gap=0.0 if found.is_exact else found.gap)

    def cut_without_slow(self, present: UnitShares) -> Cut:
        """The fastest of all N ranks, all but the slowest, all but the two slowest, and so on.

        Ranks are dropped in the order of their time for an even share. Where the order of the ranks
        is the same at any share (speeds that differ by a factor, memory alike), no other set of
        members is faster; see `ntp_core.planning.members` for one kind and any costs.
        """
        order = self._slowest_first()
        cuts: list[Cut] = []
        trials: list[Trial] = []
        for dropped in range(len(order)):
            places = sorted(order[dropped:])
            members = self.only(places)
            try:
                cut = members.cut({k: [own[i] for i in places] for k, own in present.items()})
            except PlanError:
                if not cuts:
                    raise
                break  # fewer hold even less
            cuts.append(cut)
            work_s, collective_s = members.work_s(cut.shares), members.collective_s
            trial = Trial(members=tuple(places), work_s=work_s, collective_s=collective_s)
            trials.append(trial)
            if members._units_alone_s() >= min(t.time_s for t in trials):
                break  # fewer members take no less for the units themselves
        best = min(range(len(trials)), key=lambda i: trials[i].time_s)
        return replace(cuts[best], trials=tuple(trials))

    def _slowest_first(self) -> list[int]:
        size = len(self.states)
        even = {k: -(-n // size) for k, n in self.model.counts.items()}
        times = [sum(self.costs[k][i].time_s(n) for k, n in even.items()) for i in range(size)]
        return sorted(range(size), key=lambda i: (-times[i], -i))

    def _units_alone_s(self) -> float:
        """Least time for the units when ranks without units need not take part."""
        counts, costs = self.model.counts, self.costs
        return sum(max_time_s(min_max_shares(n, costs[k]), costs[k]) for k, n in counts.items())

    def _free_shares(self, present: UnitShares) -> Shares:
        """Each kind on its own. All ranks start each block, so a late start passes anyway."""
        return {
            k: min_max_shares(
                n,
                self.costs[k],
                present.get(k),
                floor_s=max(c.time_s(0) for c in self.costs[k]),
            )
            for k, n in self.model.counts.items()
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How one replica is cut.

    Attributes:
        replica: the ranks that take part.
        shares: kind -> units of each of them.
        trials: what other numbers of members would bring, when they were compared; their
            members are places in the list of ranks that was given.
        gap: how much faster a better cut could be at most, as a part; 0 when this one is optimal.
    """

    replica: Replica
    shares: Shares
    trials: tuple[Trial, ...] = ()
    gap: float = 0.0

    @property
    def sequence_s(self) -> float:
        """Time of one sequence."""
        return self.replica.sequence_s(self.shares)
