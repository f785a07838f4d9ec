"""128 heads on 30 and 28 ranks, the paper's own case (arXiv 2504.06095): planned and summed."""

from __future__ import annotations

from collections import Counter
from math import gcd

import pytest

from ntp_core.job import even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.placement import place, place_plan, sync_shape
from ntp_core.plan import Plan
from ntp_core.planner import RankCost, min_max_shares
from ntp_core.segments import segments, sync_groups
from ntp_core.traffic import least_bytes, segment_traffic
from ntp_core.units import UnitKind

A = UnitKind.ATTENTION
HEADS = 128
MODEL = LlamaConfig(
    heads=HEADS, kv_heads=HEADS, width=512, ffn=960, mlp_block=4, vocab=960, layers=1
)
DEGREES = [(30,), (28,), (32, 30), (32, 28), (30, 28), (32, 30, 28), (32, 32, 32, 30)]


@pytest.mark.parametrize(("degree", "many", "few"), [(30, 8, 22), (28, 16, 12)])
def test_heads_are_spread_as_evenly_as_whole_heads_can(degree: int, many: int, few: int) -> None:
    """128 = 8 x 5 + 22 x 4 = 16 x 5 + 12 x 4."""
    shares = min_max_shares(HEADS, [RankCost(unit_s=1.0)] * degree)
    assert Counter({5: many, 4: few}) == Counter(shares)


@pytest.mark.parametrize("degrees", DEGREES, ids=str)
def test_plan_of_128_heads_is_a_partition_with_the_least_traffic(degrees: tuple[int, ...]) -> None:
    """Each head once in each replica; each rank sends what it holds, once; order is one."""
    plan = place_plan(even_plan(MODEL, degrees, sum(degrees)))
    assert plan == Plan.from_json(plan.to_json())
    for r in plan.replicas:
        held = [u for i in range(len(r.ranks)) for u in r.layout(A).units(i)]
        assert sorted(held) == list(range(HEADS))
        assert max(r.layout(A).shares) - min(r.layout(A).shares) <= 1
    units = MODEL.units()
    traffic = segment_traffic(plan, units)
    assert least_bytes(plan, units) == {g: t.num_bytes for g, t in traffic.items()}
    found = segments(plan, units.tensor("layers.0.q.weight"))
    assert len(found) <= sum(degrees) * 2
    assert [g.ranks for g in sync_groups(plan, units)] == sorted(
        {g.ranks for g in sync_groups(plan, units)}
    )


@pytest.mark.parametrize("degrees", [(32, 30), (32, 28), (30, 28)], ids=str)
def test_two_replicas_of_128_heads_sum_in_few_groups(degrees: tuple[int, int]) -> None:
    """At most d - 1 segments, d ranks in both; at least the d - gcd groups that must be."""
    placed = place([min_max_shares(HEADS, [RankCost(unit_s=1.0)] * d) for d in degrees])
    shape = sync_shape([placed])
    least = max(degrees)
    assert least <= shape.groups <= shape.segments <= sum(degrees) - 1
    assert shape.groups <= sum(degrees) - gcd(*degrees)
