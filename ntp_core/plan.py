"""Plans: who owns which unit in each replica, and how much of the batch each replica takes.

A plan is frozen data with a content digest. It can only be built when it is a partition: in every
replica each unit of each kind has exactly one owner, and no rank serves two replicas.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from ntp_core.errors import ModelMismatch, PlanError
from ntp_core.inbound.ranges import check_whole
from ntp_core.units import ModelUnits, UnitKind

Run = tuple[int, int]

MAX_UNITS = 1 << 53
"""Of one kind, and of anything else that is counted: what JSON keeps exactly."""
MAX_RANK = (1 << 31) - 1  # ranks, epochs and batches have 32 bits in records
MAX_LAYER = 4095


def runs_of(units: Iterable[int]) -> tuple[Run, ...]:
    """Ascending units as [start, stop) runs.

    >>> runs_of([0, 1, 2, 7, 8])
    ((0, 3), (7, 9))
    """
    runs: list[list[int]] = []
    for u in sorted(units):
        if runs and runs[-1][1] == u:
            runs[-1][1] = u + 1
        else:
            runs.append([u, u + 1])
    return tuple((a, b) for a, b in runs)


@dataclass(frozen=True, slots=True)
class Layout:
    """Units of one kind in one replica: for each tp_rank its runs of units, ascending.

    >>> Layout.contiguous((3, 2, 0)).shares
    (3, 2, 0)
    """

    runs: tuple[tuple[Run, ...], ...]

    @classmethod
    def contiguous(cls, shares: Iterable[int]) -> Layout:
        """Consecutive units: the first share to tp_rank 0, the next to tp_rank 1, and so on."""
        runs, start = [], 0
        for share in shares:
            runs.append(((start, start + share),) if share else ())
            start += share
        return cls(tuple(runs))

    @classmethod
    def of_units(cls, units: Iterable[Iterable[int]]) -> Layout:
        """From the list of units of each tp_rank."""
        return cls(tuple(runs_of(u) for u in units))

    @property
    def shares(self) -> tuple[int, ...]:
        """Number of units of each tp_rank."""
        return tuple(sum(b - a for a, b in runs) for runs in self.runs)

    def units(self, tp_rank: int) -> tuple[int, ...]:
        """All units of one tp_rank, ascending."""
        return tuple(u for a, b in self.runs[tp_rank] for u in range(a, b))

    def owners(self, num_units: int) -> list[int]:
        """tp_rank of each unit; -1 where none owns it. Raises PlanError when two do."""
        self.gaps(num_units)
        owner = [-1] * num_units
        for tp_rank, runs in enumerate(self.runs):
            for a, b in runs:
                owner[a:b] = [tp_rank] * (b - a)
        return owner

    def gaps(self, num_units: int) -> tuple[Run, ...]:
        """Runs of units that no rank owns. Its cost grows with the runs, not with the units.

        Raises:
            PlanError: when two ranks own a unit, or a run is not where runs may be.
        """
        found: list[tuple[int, int, int]] = []
        for tp_rank, runs in enumerate(self.runs):
            end = -1
            for a, b in runs:
                if not end < a < b <= num_units:
                    raise PlanError(
                        f"tp_rank {tp_rank} holds [{a}, {b}) of {num_units} units; "
                        "runs must ascend, apart from each other, inside the units"
                    )
                end = b
                found.append((a, b, tp_rank))
        missing: list[Run] = []
        end, holder = 0, -1
        for a, b, tp_rank in sorted(found):
            if a < end:
                raise PlanError(f"unit {a} is held by tp_rank {holder} and by tp_rank {tp_rank}")
            if a > end:
                missing.append((end, a))
            end, holder = b, tp_rank
        return (*missing, (end, num_units)) if end < num_units else tuple(missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """One copy of the model over a tensor-parallel group.

    Attributes:
        ranks: global ranks in tp_rank order.
        layouts: unit kind -> layout over those ranks.
        batch: sequences of the global batch that this replica takes, > 0.
        overrides: (kind, layer) -> layout that replaces `layouts[kind]` in that layer.
    """

    ranks: tuple[int, ...]
    layouts: dict[UnitKind, Layout]
    batch: int
    overrides: dict[tuple[UnitKind, int], Layout] = field(default_factory=dict)

    def layout(self, kind: UnitKind, layer: int = -1) -> Layout:
        """The layout in force for a kind in a layer."""
        return self.overrides.get((kind, layer), self.layouts[kind])


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """All replicas of a job. Build it with `Plan.build`, which refuses what is not a partition.

    Attributes:
        epoch: grows by one with every allocation change; fences old messages.
        counts: unit kind -> number of units.
        replicas: in dp_rank order.
    """

    epoch: int
    counts: dict[UnitKind, int]
    replicas: tuple[ReplicaPlan, ...]

    @classmethod
    def build(
        cls, counts: dict[UnitKind, int], replicas: Iterable[ReplicaPlan], epoch: int = 1
    ) -> Plan:
        """A checked plan.

        Raises:
            PlanError: naming replica, unit kind and what is wrong.
        """
        plan = cls(epoch=epoch, counts=dict(counts), replicas=tuple(replicas))
        _check_ranks(plan)
        _check_counts(plan)
        for index, r in enumerate(plan.replicas):
            _check_replica(plan, index, r)
        return plan

    @property
    def ranks(self) -> tuple[int, ...]:
        """All global ranks of the plan, ascending."""
        return tuple(sorted(g for r in self.replicas for g in r.ranks))

    @property
    def global_batch(self) -> int:
        """Sequences per step over all replicas."""
        return sum(r.batch for r in self.replicas)

    def place(self, global_rank: int) -> tuple[int, int]:
        """(replica index, tp_rank) of a global rank. Raises PlanError for a rank without place."""
        for index, r in enumerate(self.replicas):
            if global_rank in r.ranks:
                return index, r.ranks.index(global_rank)
        raise PlanError(f"rank {global_rank} has no place in the plan of epoch {self.epoch}")

    def with_epoch(self, epoch: int) -> Plan:
        """The same allocation under another epoch; the digest stays the same."""
        return replace(self, epoch=epoch)

    @property
    def digest(self) -> str:
        """16 hex digits over the allocation, without the epoch: equal content, equal digest."""
        body = {k: v for k, v in self.to_json().items() if k != "epoch"}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_json(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "epoch": self.epoch,
            "counts": {str(k): n for k, n in self.counts.items()},
            "replicas": [
                {
                    "ranks": list(r.ranks),
                    "batch": r.batch,
                    "layouts": {str(k): _runs_json(v) for k, v in r.layouts.items()},
                    "overrides": [
                        {"kind": str(kind), "layer": layer, "runs": _runs_json(v)}
                        for (kind, layer), v in sorted(r.overrides.items())
                    ],
                }
                for r in self.replicas
            ],
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        """Inverse of `to_json`, checked. Raises PlanError on anything that is not a valid plan."""
        try:
            replicas = [_replica_from_json(r) for r in data["replicas"]]
            counts = {
                UnitKind(k): check_whole(f"counts of {k}", n, 1, MAX_UNITS, PlanError)
                for k, n in data["counts"].items()
            }
            epoch = check_whole("epoch", data["epoch"], 0, MAX_RANK, PlanError)
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise PlanError(f"not a plan: {error!r}. Write it with Plan.to_json.") from error
        return cls.build(counts, replicas, epoch=epoch)

    def check_model(self, model: ModelUnits) -> None:
        """Raises ModelMismatch unless this plan is made for `model`: its units and its layers."""
        if self.counts != model.counts:
            want = {str(k): n for k, n in model.counts.items()}
            have = {str(k): n for k, n in self.counts.items()}
            raise ModelMismatch(
                f"the plan is made for units {have}, the model has {want}. "
                "Make the plan from this model's units."
            )
        known = {(t.kind, t.layer) for t in model.tensors}
        for index, r in enumerate(self.replicas):
            for kind, layer in r.overrides:
                if (kind, layer) not in known:
                    raise ModelMismatch(
                        f"replica {index} overrides {kind} units of layer {layer}, where the model "
                        "has none; leave the override out"
                    )


def _check_ranks(plan: Plan) -> None:
    if not plan.replicas:
        raise PlanError("a plan needs at least one replica")
    seen: dict[int, int] = {}
    for index, r in enumerate(plan.replicas):
        if not r.ranks:
            raise PlanError(f"replica {index} has no rank; leave the replica out of the plan")
        if not 1 <= r.batch <= MAX_RANK:
            raise PlanError(
                f"replica {index} takes {r.batch} sequences; it needs 1 to {MAX_RANK} of them"
            )
        for g in r.ranks:
            if not 0 <= g <= MAX_RANK or g in seen:
                raise PlanError(
                    f"rank {g} of replica {index} is negative, above {MAX_RANK}, or has a place "
                    f"already (replica {seen.get(g, '-')}); give each rank one place"
                )
            seen[g] = index


def _check_counts(plan: Plan) -> None:
    for kind, count in plan.counts.items():
        if count < 1:
            raise PlanError(f"the plan counts {count} {kind} units; leave the kind out or count 1")


def _check_replica(plan: Plan, index: int, r: ReplicaPlan) -> None:
    if set(r.layouts) != set(plan.counts):
        raise PlanError(
            f"replica {index} has layouts for {sorted(map(str, r.layouts))}, the plan counts "
            f"{sorted(map(str, plan.counts))} units"
        )
    strange = sorted({str(k) for k, _ in r.overrides if k not in plan.counts})
    if strange:
        raise PlanError(
            f"replica {index} overrides layouts of {strange} units, which the plan does not count"
        )
    for kind, layer in r.overrides:
        if kind is UnitKind.VOCAB or not 0 <= layer <= MAX_LAYER:
            raise PlanError(
                f"replica {index} overrides {kind} units of layer {layer}; vocab units are in no "
                f"layer, others in layers 0 to {MAX_LAYER}. Name a layer of the model."
            )
    named = [(str(k), k, v) for k, v in r.layouts.items()]
    named += [(f"{k} in layer {layer}", k, v) for (k, layer), v in r.overrides.items()]
    for name, kind, layout in named:
        if len(layout.runs) != len(r.ranks):
            raise PlanError(
                f"replica {index}: the {name} layout is for {len(layout.runs)} ranks, "
                f"the replica has {len(r.ranks)}"
            )
        try:
            missing = layout.gaps(plan.counts[kind])
        except PlanError as error:
            raise PlanError(f"replica {index}, {name} units: {error}") from None
        if missing:
            text = ", ".join(f"[{a}, {b})" for a, b in missing)
            raise PlanError(
                f"replica {index}: {name} units {text} of {plan.counts[kind]} have no owner. "
                "Give each unit to one rank."
            )


def _runs_json(layout: Layout) -> list[list[list[int]]]:
    return [[[a, b] for a, b in runs] for runs in layout.runs]


def _layout_from_json(data: Any) -> Layout:
    return Layout(tuple(tuple(_run_from_json(run) for run in runs) for runs in data))


def _run_from_json(data: Any) -> Run:
    start, stop = (check_whole("end of a run", unit, 0, MAX_UNITS, PlanError) for unit in data)
    return start, stop


def _replica_from_json(data: Any) -> ReplicaPlan:
    return ReplicaPlan(
        ranks=tuple(check_whole("rank", g, 0, MAX_RANK, PlanError) for g in data["ranks"]),
        batch=check_whole("batch", data["batch"], 1, MAX_RANK, PlanError),
        layouts={UnitKind(k): _layout_from_json(v) for k, v in data["layouts"].items()},
        overrides={
            (
                UnitKind(o["kind"]),
                check_whole("layer", o["layer"], 0, MAX_LAYER, PlanError),
            ): _layout_from_json(o["runs"])
            for o in data.get("overrides", [])
        },
    )
