"""Plans: only a partition can be built, and what is refused is named."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ntp_core.errors import ModelMismatch, PlanError
from ntp_core.plan import MAX_LAYER, Layout, Plan, ReplicaPlan, runs_of
from ntp_core.units import ModelUnits, TensorSpec, UnitKind
from tests.support.random_plans import A, E, M, V, random_model, random_plan

COUNTS = {A: 4, M: 6}
Body = dict[str, Any]


def replica(
    ranks: tuple[int, ...] = (0, 1),
    attention: tuple[tuple[tuple[int, int], ...], ...] = (((0, 2),), ((2, 4),)),
    mlp: tuple[tuple[tuple[int, int], ...], ...] = (((0, 3),), ((3, 6),)),
    batch: int = 1,
) -> ReplicaPlan:
    """A replica of two ranks that is right unless told otherwise."""
    return ReplicaPlan(ranks=ranks, layouts={A: Layout(attention), M: Layout(mlp)}, batch=batch)


GOOD = replica()

INVALID: dict[str, tuple[list[ReplicaPlan], list[str]]] = {
    "no replica": ([], ["at least one replica"]),
    "no rank": ([GOOD, replica(ranks=())], ["replica 1", "no rank"]),
    "no batch": ([GOOD, replica(ranks=(2, 3), batch=0)], ["replica 1", "0 sequences"]),
    "negative batch": ([replica(batch=-3)], ["replica 0", "-3 sequences"]),
    "rank twice in a replica": ([replica(ranks=(1, 1))], ["rank 1", "replica 0", "place already"]),
    "rank in two replicas": ([GOOD, replica(ranks=(1, 2))], ["rank 1", "replica 1", "replica 0"]),
    "negative rank": ([replica(ranks=(0, -1))], ["rank -1", "replica 0"]),
    "too few tp_ranks": ([replica(mlp=(((0, 6),),))], ["replica 0", "mlp", "1 ranks"]),
    "too many tp_ranks": (
        [replica(mlp=(((0, 3),), ((3, 6),), ()))],
        ["replica 0", "mlp", "3 ranks"],
    ),
    "units without owner": (
        [GOOD, replica(ranks=(2, 3), mlp=(((0, 2),), ((4, 5),)))],
        ["replica 1", "mlp", "[2, 4), [5, 6)", "no owner"],
    ),
    "unit with two owners": (
        [replica(attention=(((0, 3),), ((2, 4),)))],
        ["replica 0", "attention", "unit 2", "tp_rank 0", "tp_rank 1"],
    ),
    "unit beyond the last": (
        [replica(mlp=(((0, 3),), ((3, 7),)))],
        ["replica 0", "mlp", "[3, 7) of 6"],
    ),
    "negative unit": ([replica(mlp=(((-1, 3),), ((3, 6),)))], ["replica 0", "mlp", "[-1, 3)"]),
    "empty run": ([replica(mlp=(((0, 0), (1, 3)), ((3, 6),)))], ["mlp", "[0, 0)"]),
    "backward run": ([replica(mlp=(((3, 0),), ((3, 6),)))], ["mlp", "[3, 0)"]),
    "runs that touch": ([replica(mlp=(((0, 1), (1, 3)), ((3, 6),)))], ["mlp", "[1, 3)"]),
    "runs out of order": ([replica(mlp=(((2, 3), (0, 2)), ((3, 6),)))], ["mlp", "[0, 2)"]),
    "kind missing": (
        [replace(GOOD, layouts={A: GOOD.layouts[A]})],
        ["replica 0", "['attention']", "'mlp'"],
    ),
    "kind too many": (
        [replace(GOOD, layouts=GOOD.layouts | {V: Layout(((), ()))})],
        ["replica 0", "'vocab'"],
    ),
    "override leaves units": (
        [replace(GOOD, overrides={(M, 3): Layout(((), ((0, 5),)))})],
        ["replica 0", "mlp in layer 3", "[5, 6)"],
    ),
    "override of a kind not counted": (
        [replace(GOOD, overrides={(E, 0): Layout(((), ()))})],
        ["replica 0", "expert"],
    ),
}


@pytest.mark.parametrize("case", INVALID)
def test_build_refuses_what_is_no_partition_and_names_it(case: str) -> None:
    """Replica, unit kind and units stand in the message."""
    replicas, words = INVALID[case]
    with pytest.raises(PlanError) as error:
        Plan.build(COUNTS, replicas)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("count", [0, -1])
def test_build_refuses_a_count_below_one(count: int) -> None:
    """A kind without units is left out, not counted as none."""
    layouts = {A: GOOD.layouts[A], M: Layout(((), ()))}
    with pytest.raises(PlanError, match=f"{count} mlp units"):
        Plan.build(COUNTS | {M: count}, [replace(GOOD, layouts=layouts)])


@pytest.mark.parametrize("seed", range(50))
def test_random_plan_every_unit_has_one_owner(seed: int) -> None:
    """What can be built is a partition, counted unit by unit, and shares say the same."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = random_plan(draw, model)
    for r in plan.replicas:
        for layout, count in [
            *((v, model.counts[k]) for k, v in r.layouts.items()),
            *((v, model.counts[k]) for (k, _), v in r.overrides.items()),
        ]:
            held = [u for tp_rank in range(len(r.ranks)) for u in layout.units(tp_rank)]
            assert list(range(count)) == sorted(held)
            owners = layout.owners(count)
            for tp_rank, share in enumerate(layout.shares):
                assert share == owners.count(tp_rank) == len(layout.units(tp_rank))
                assert all(owners[u] == tp_rank for u in layout.units(tp_rank))


@pytest.mark.parametrize("seed", range(50))
def test_json_round_trip_keeps_content_and_digest(seed: int) -> None:
    """Through real JSON text and back, the plan is equal and so is its digest."""
    draw = random.Random(seed)
    plan = random_plan(draw, random_model(draw))
    again = Plan.from_json(json.loads(json.dumps(plan.to_json())))
    assert plan == again
    assert plan.digest == again.digest


def test_digest_is_equal_only_for_equal_content() -> None:
    """Over many small plans: one digest for each content; the epoch is not part of it."""
    by_digest: dict[str, Plan] = {}
    for seed in range(3000):
        draw = random.Random(seed)
        model = ModelUnits(counts={A: draw.randint(1, 3)}, tensors=())
        layouts = {A: Layout.contiguous([model.counts[A], 0])}
        if draw.random() < 0.5:
            layouts = {A: Layout.contiguous([0, model.counts[A]])}
        ranks = draw.choice([(0, 1), (1, 0)])
        overrides = {(A, draw.randint(0, 1)): layouts[A]} if draw.random() < 0.5 else {}
        one = ReplicaPlan(
            ranks=ranks, layouts=layouts, batch=draw.randint(1, 2), overrides=overrides
        )
        plan = Plan.build(model.counts, [one], epoch=1)
        assert plan.digest == plan.with_epoch(draw.randint(2, 9)).digest
        assert plan == by_digest.setdefault(plan.digest, plan)
    assert len({json.dumps(p.to_json(), sort_keys=True) for p in by_digest.values()}) == len(
        by_digest
    )
    assert len(by_digest) > 50


def test_digest_of_a_known_plan_does_not_drift() -> None:
    """The digest is part of the wire: it must stay the same from version to version."""
    assert Plan.build(COUNTS, [GOOD]).digest == "afc6a7f055c68526"


def test_place_finds_replica_and_tp_rank() -> None:
    """A rank is found where it stands; one without a place is an error."""
    plan = Plan.build(COUNTS, [GOOD, replica(ranks=(5, 3))])
    assert plan.place(5) == (1, 0)
    assert plan.place(3) == (1, 1)
    assert plan.ranks == (0, 1, 3, 5)
    assert plan.global_batch == 2
    with pytest.raises(PlanError, match="rank 4 has no place"):
        plan.place(4)


def test_layout_override_is_in_force_in_its_layer_only() -> None:
    """Other layers and kinds keep the replica's layout."""
    own = Layout(((), ((0, 6),)))
    r = replace(GOOD, overrides={(M, 1): own})
    assert own == r.layout(M, 1)
    assert GOOD.layouts[M] == r.layout(M, 0) == r.layout(M)
    assert GOOD.layouts[A] == r.layout(A, 1)


def test_check_model_names_both_counts() -> None:
    """A plan for other units is refused with both counts."""
    plan = Plan.build(COUNTS, [GOOD])
    plan.check_model(ModelUnits(counts=COUNTS, tensors=()))
    with pytest.raises(ModelMismatch, match=r"'mlp': 6(.|\n)*'mlp': 7"):
        plan.check_model(ModelUnits(counts=COUNTS | {M: 7}, tensors=()))


@pytest.mark.parametrize(
    ("kind", "layer"), [(M, -7), (M, 10**9), (A, -1), (M, MAX_LAYER + 1), (UnitKind.VOCAB, 0)]
)
def test_override_where_no_layer_can_be_is_refused(kind: UnitKind, layer: int) -> None:
    """Vocab units are in no layer, and no model has a billion of them."""
    counts = COUNTS | {UnitKind.VOCAB: 6}
    own = Layout(((), ((0, counts[kind]),)))
    r = replace(
        GOOD,
        layouts=GOOD.layouts | {UnitKind.VOCAB: Layout(((), ((0, 6),)))},
        overrides={(kind, layer): own},
    )
    with pytest.raises(PlanError, match=f"{kind} units of layer {layer};"):
        Plan.build(counts, [r])


def test_check_model_refuses_an_override_of_a_layer_that_it_lacks() -> None:
    """It would change nothing, and its maker believes that it does."""
    own = Layout(((), ((0, 6),)))
    plan = Plan.build(COUNTS, [replace(GOOD, overrides={(M, 1): own})])
    layers = tuple(TensorSpec(name=f"up{i}", shape=(6, 2), kind=M, layer=i) for i in range(2))
    plan.check_model(ModelUnits(counts=COUNTS, tensors=layers))
    with pytest.raises(ModelMismatch, match="mlp units of layer 1,"):
        plan.check_model(ModelUnits(counts=COUNTS, tensors=layers[:1]))


@pytest.mark.parametrize("value", [0.9, 1.0, "1", True, None, -1, 2**31])
@pytest.mark.parametrize("place", ["epoch", "rank", "batch", "end", "layer"])
def test_from_json_rounds_nothing_and_reads_no_text(place: str, value: object) -> None:
    """What is not a whole number within bounds is refused by name and value."""
    own = Layout(((), ((0, 6),)))
    body = Plan.build(COUNTS, [replace(GOOD, overrides={(M, 1): own})]).to_json()
    set_layer = _set("replicas", 0, "overrides", 0, "layer")
    (HOSTILE_PLACES | {"layer": set_layer})[place](body, value)
    with pytest.raises(PlanError, match=re.escape("None" if value is None else str(value))):
        Plan.from_json(body)


@given(st.sets(st.integers(0, 200)))
def test_runs_of_are_maximal_and_complete(units: set[int]) -> None:
    """Runs hold just the units, ascend, and never touch."""
    runs = runs_of(units)
    assert sorted(units) == [u for a, b in runs for u in range(a, b)]
    assert all(left[1] < right[0] for left, right in pairwise(runs))


def _set(*path: str | int) -> Callable[[Body, object], None]:
    def edit(body: Body, value: object) -> None:
        where: Any = body
        for step in path[:-1]:
            where = where[step]
        where[path[-1]] = value

    return edit


HOSTILE_VALUES: list[object] = [
    None,
    True,
    -1,
    10**18,
    10**400,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    "9" * 5000,
    [],
    [[]],
    [[[]]],
    [[[0, 1, 2]]],
    [[[0, 10**18]]],
    [[[-(10**18), 4]]],
    {},
    {"attention": {}},
    {"no such kind": 3},
    [None, None],
]
HOSTILE_PLACES = {
    "epoch": _set("epoch"),
    "counts": _set("counts"),
    "one count": _set("counts", "attention"),
    "replicas": _set("replicas"),
    "replica": _set("replicas", 0),
    "ranks": _set("replicas", 0, "ranks"),
    "rank": _set("replicas", 0, "ranks", 0),
    "batch": _set("replicas", 0, "batch"),
    "layouts": _set("replicas", 0, "layouts"),
    "layout": _set("replicas", 0, "layouts", "attention"),
    "runs": _set("replicas", 0, "layouts", "attention", 0),
    "run": _set("replicas", 0, "layouts", "attention", 0, 0),
    "end": _set("replicas", 0, "layouts", "attention", 0, 0, 1),
    "overrides": _set("replicas", 0, "overrides"),
}


@pytest.mark.parametrize("place", HOSTILE_PLACES)
def test_from_json_hostile_value_is_a_plan_error_or_a_valid_plan(place: str) -> None:
    """Any value anywhere: PlanError and nothing else, or a plan that holds; and at once."""
    for value in HOSTILE_VALUES:
        body = Plan.build(COUNTS, [GOOD]).to_json()
        HOSTILE_PLACES[place](body, value)
        begin = time.process_time()
        try:
            plan = Plan.from_json(body)
        except PlanError:
            pass
        else:
            assert plan == Plan.build(plan.counts, plan.replicas, epoch=plan.epoch)
        assert time.process_time() - begin < 5.0, value


@pytest.mark.parametrize("body", [None, 3, "plan", [], [1], {}, {"replicas": []}])
def test_from_json_of_something_else_is_a_plan_error(body: Any) -> None:
    """What is not even an object is refused the same way."""
    with pytest.raises(PlanError, match="not a plan"):
        Plan.from_json(body)


def test_from_json_huge_but_valid_plan_is_read_at_once() -> None:
    """Cost grows with what is written, not with the numbers in it."""
    units = 10**15
    body = Plan.build(COUNTS, [GOOD]).to_json()
    body["counts"]["mlp"] = units
    body["replicas"][0]["layouts"]["mlp"] = [[[0, 7]], [[7, units]]]
    plan = Plan.from_json(body)
    assert (7, units - 7) == plan.replicas[0].layouts[M].shares
