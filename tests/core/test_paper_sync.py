"""The paper's resharding as a plan: what goes to the cores, in which lanes, and how much."""

from __future__ import annotations

import random

import pytest

from ntp_core.paper_sync import lane_blocks, lane_groups, reshard_traffic, sends
from ntp_core.placement import core_extra
from ntp_core.plan import Plan, ReplicaPlan
from ntp_core.reshard import blocks_held
from ntp_core.segments import block_holders
from ntp_core.traffic import Traffic, segment_traffic
from ntp_core.units import ModelUnits, TensorSpec
from tests.support.random_plans import A, M, random_model, random_plan

SHARED = ModelUnits(
    counts={A: 12},
    tensors=(
        TensorSpec(name="q", shape=(12, 4), kind=A),
        TensorSpec(name="k", shape=(8, 4), kind=A, sharing=3),
    ),
)


@pytest.mark.parametrize("seed", range(60))
def test_sends_bring_every_copy_to_its_lane_once(seed: int) -> None:
    """After the sends the core of a lane has heard of each holder in its replica."""
    draw = random.Random(seed)
    model = SHARED if seed % 3 == 0 else random_model(draw)
    plan = random_plan(draw, model, [draw.randint(1, 4) for _ in range(draw.randint(1, 4))])
    cores = lane_groups(plan)
    assert min(len(r.ranks) for r in plan.replicas) == len(cores)
    found = sends(plan, model)
    for index, t in enumerate(model.tensors):
        if t.kind is None:
            continue
        lanes = lane_blocks(plan, t)
        num_blocks = model.counts[t.kind] // t.sharing
        assert sorted(b for blocks in lanes for b in blocks) == list(range(num_blocks))
        sent = [(b, s.src, s.core) for s in found if s.tensor == index for b in s.blocks]
        assert len(set(sent)) == len(sent)
        expected = {
            (b, g, cores[lane][number])
            for lane, blocks in enumerate(lanes)
            for b in blocks
            for g in block_holders(plan, t)[b]
            for number in [plan.place(g)[0]]
            if g != cores[lane][number]
        }
        assert expected == set(sent)
        assert all(b in blocks_held(plan, t, src) for b, src, _ in sent)


def test_reshard_traffic_of_the_papers_layout() -> None:
    """4 ranks beside 3: the extra rank sends all it has and gets it back; cores sum a third."""
    t = TensorSpec(name="w", shape=(24, 5), kind=M)
    model = ModelUnits(counts={M: 24}, tensors=(t,))
    healthy, reduced = core_extra([(6, 6, 6, 6), (8, 8, 8)])
    plan = Plan.build(
        {M: 24},
        [
            ReplicaPlan(ranks=(0, 1, 2, 3), layouts={M: healthy}, batch=1),
            ReplicaPlan(ranks=(4, 5, 6), layouts={M: reduced}, batch=1),
        ],
    )
    traffic = reshard_traffic(plan, model)
    unit = 5 * 4
    core = Traffic(num_bytes=(8 + 2) * unit, messages=2, collectives=3)
    assert dict.fromkeys((0, 1, 2), core) == {g: traffic[g] for g in (0, 1, 2)}
    assert Traffic(num_bytes=6 * unit, messages=3, collectives=2) == traffic[3]
    assert Traffic(num_bytes=8 * unit, messages=1, collectives=1) == traffic[4]
    direct = segment_traffic(plan, model)
    assert [6 * unit] * 4 == [direct[g].num_bytes for g in range(4)], "no rank sends more"


def test_reshard_of_equal_layouts_moves_nothing() -> None:
    """Where all replicas are alike the lanes are the ranks."""
    plan = random_plan(random.Random(3), SHARED, [3])
    twin = Plan.build(
        plan.counts,
        [plan.replicas[0], ReplicaPlan(ranks=(3, 4, 5), layouts=plan.replicas[0].layouts, batch=1)],
    )
    q = ModelUnits(counts=SHARED.counts, tensors=SHARED.tensors[:1])
    assert sends(twin, q) == ()
