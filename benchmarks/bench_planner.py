"""The planner: is it exact, what does exactness bring, and what does it cost.

    python -m benchmarks.bench_planner [--json] [--quick]

Times are processor time of the calling thread, median over repeats, so that they say what a plan
costs whoever else uses the machine.

The oracle is dynamic programming over ranks, which shares no code with the planner. The peers of
the comparison are the roundings that planners use elsewhere: largest remainder (Hamilton), Webster,
and round each quota, then give or take the difference at the fastest ranks.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ntp_core.cost import Work
from ntp_core.planner import RankCost, max_time_s, min_max_shares
from ntp_core.planning.fleet import plan_fleet
from ntp_core.planning.job import plan_job
from ntp_core.planning.phases import RankSpeed
from ntp_core.planning.replica import RankState
from ntp_core.units import ModelUnits, UnitKind

COUNTS = {UnitKind.ATTENTION: 128, UnitKind.MLP: 224, UnitKind.VOCAB: 1002}
"""Query heads, tiles of 128 FFN columns, blocks of 128 vocab rows."""

WORK = Work(unit={UnitKind.ATTENTION: 30.0, UnitKind.MLP: 80.0, UnitKind.VOCAB: 0.7}, rank=40.0)
COLUMNS = 28672
REPLICAS = 4096
FLEET_RANKS = 72
DEAD = 0.004
TARGET_TP72_MS = 10.0
TARGET_FLEET_S = 1.0
ORACLE_DRAWS, ROUNDING_DRAWS = 10_000, 20_000

Costs = Sequence[RankCost]
Rounding = Callable[[int, Sequence[float]], list[int]]


def _hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else ():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _oracle_s(units: int, costs: Costs) -> float:
    """Least time of the slowest rank for all units, rank by rank; infinite where caps forbid."""
    best = [0.0] + [math.inf] * units
    for c in costs:
        most = units if c.cap is None else min(units, c.cap)
        times = [0.0] + [c.time_s(n) for n in range(1, most + 1)]
        best = [
            min(max(times[n], best[u - n]) for n in range(min(u, most) + 1))
            for u in range(units + 1)
        ]
    return best[units]


def _mismatches(draws: int) -> int:
    """Draws of 2-4 ranks with starts and caps in which the shares are not the oracle's optimum."""
    wrong = 0
    for seed in range(draws):
        draw = random.Random(seed)
        costs = [
            RankCost(
                unit_s=draw.choice([1.0, 0.5, draw.uniform(0.1, 3)]),
                start_s=draw.choice([0.0, 0.0, draw.uniform(0, 4)]),
                cap=draw.choice([None, None, draw.randint(0, 10)]),
            )
            for _ in range(draw.randint(2, 4))
        ]
        units = draw.randint(1, 14)
        if sum(units if c.cap is None else c.cap for c in costs) < units:
            continue
        wrong += max_time_s(min_max_shares(units, costs), costs) != _oracle_s(units, costs)
    return wrong


def _quotas(units: int, speeds: Sequence[float]) -> list[float]:
    return [units * v / sum(speeds) for v in speeds]


def _largest_remainder(units: int, speeds: Sequence[float]) -> list[int]:
    quotas = _quotas(units, speeds)
    shares = [int(q) for q in quotas]
    by_rest = sorted(range(len(speeds)), key=lambda i: shares[i] - quotas[i])
    for i in by_rest[: units - sum(shares)]:
        shares[i] += 1
    return shares


def _webster(units: int, speeds: Sequence[float]) -> list[int]:
    shares = [0] * len(speeds)
    for _ in range(units):
        shares[max(range(len(speeds)), key=lambda i: speeds[i] / (2 * shares[i] + 1))] += 1
    return shares


def _round_then_fix(units: int, speeds: Sequence[float]) -> list[int]:
    shares = [round(q) for q in _quotas(units, speeds)]
    by_speed = sorted(range(len(speeds)), key=lambda i: -speeds[i])
    missing = units - sum(shares)
    for i in by_speed[: abs(missing)]:
        shares[i] += 1 if missing > 0 else -1
    return shares


ROUNDINGS: dict[str, Rounding] = {
    "largest remainder": _largest_remainder,
    "Webster": _webster,
    "round then fix": _round_then_fix,
}


def _against_roundings(draws: int) -> dict[str, dict[str, float]]:
    """8 ranks, 32-128 units, each rank slowed to 0.4-1 with a chance of 30 %."""
    extra: dict[str, list[float]] = {name: [] for name in ROUNDINGS}
    for seed in range(draws):
        draw = random.Random(seed)
        speeds = [draw.uniform(0.4, 1.0) if draw.random() < 0.3 else 1.0 for _ in range(8)]
        units = draw.randint(32, 128)
        costs = [RankCost(unit_s=1 / v) for v in speeds]
        ours_s = max_time_s(min_max_shares(units, costs), costs)
        for name, rounding in ROUNDINGS.items():
            extra[name].append(max_time_s(rounding(units, speeds), costs) / ours_s - 1)
    return {
        name: {
            "worse_in": round(sum(x > 1e-12 for x in values) / draws, 4),
            "slower_mean": round(statistics.mean(values), 5),
            "slower_worst": round(max(values), 4),
            "faster_in": round(sum(x < -1e-12 for x in values) / draws, 4),
        }
        for name, values in extra.items()
    }


def _deal_one_by_one(units: int, costs: Costs) -> list[int]:
    """The rule without a head start: one pass through a heap per unit."""
    shares = [0] * len(costs)
    heap = [(c.time_s(1), i) for i, c in enumerate(costs)]
    heapq.heapify(heap)
    for _ in range(units):
        _, i = heap[0]
        shares[i] += 1
        heapq.heapreplace(heap, (costs[i].time_s(shares[i] + 1), i))
    return shares


def _median_s(call: Callable[[], object], repeats: int) -> float:
    call()
    samples = []
    for _ in range(repeats):
        begin_ns = time.thread_time_ns()
        call()
        samples.append((time.thread_time_ns() - begin_ns) / 1e9)
    return statistics.median(samples)


def _draw_costs(ranks: int) -> list[RankCost]:
    draw = random.Random(ranks)
    return [RankCost(unit_s=draw.uniform(1.0, 2.0)) for _ in range(ranks)]


def _scaling(repeats: int) -> dict[str, Any]:
    """Time for 28,672 columns by number of ranks, and for 72 ranks by number of units."""
    by_ranks = {
        n: _median_s(partial(min_max_shares, COLUMNS, _draw_costs(n)), repeats) * 1e3
        for n in (8, 16, 32, 64, 128, 256, 512, 1024)
    }
    costs = _draw_costs(72)
    by_units = {
        n: _median_s(partial(min_max_shares, n, costs), repeats) * 1e3
        for n in (224, 896, 3584, COLUMNS)
    }
    one_by_one = _median_s(lambda: _deal_one_by_one(COLUMNS, costs), max(3, repeats // 4)) * 1e3
    slope, _ = np.polyfit(np.log(list(by_ranks)), np.log(list(by_ranks.values())), 1)
    return {
        "columns_28672_ms_by_ranks": {str(n): round(v, 3) for n, v in by_ranks.items()},
        "exponent_over_ranks": round(float(slope), 3),
        "ranks_72_ms_by_units": {str(n): round(v, 3) for n, v in by_units.items()},
        "ranks_72_one_by_one_ms": round(one_by_one, 3),
    }


def _replica(ranks: int) -> list[RankState]:
    draw = random.Random(ranks)
    return [
        RankState(rank=i, speed=RankSpeed(flops_per_s=draw.uniform(0.5, 1.0))) for i in range(ranks)
    ]


def _job_ms(repeats: int) -> dict[str, float]:
    """One TP72 replica, from nothing and from a present plan, in ms."""
    model = ModelUnits(counts=COUNTS, tensors=())
    states = [_replica(72)]
    even = [[RankState(rank=i, speed=RankSpeed(flops_per_s=1.0)) for i in range(72)]]
    present = plan_job(model, WORK, even, 8).plan
    fresh_s = _median_s(lambda: plan_job(model, WORK, states, 8), repeats)
    again_s = _median_s(lambda: plan_job(model, WORK, states, 8, present=present), repeats)
    return {
        "tp72_fresh_ms": round(fresh_s * 1e3, 3),
        "tp72_from_present_ms": round(again_s * 1e3, 3),
    }


def _fleet_s(repeats: int) -> dict[str, float]:
    """4,096 replicas with random speeds and dead ranks, in seconds."""
    figures = {}
    for ranks in (8, FLEET_RANKS):
        rng = np.random.default_rng(ranks)
        speeds = rng.uniform(0.5, 1.0, (REPLICAS, ranks))
        speeds[rng.random(speeds.shape) < DEAD] = 0.0
        plan = plan_fleet(COUNTS, WORK, speeds, 4 * REPLICAS)
        figures[f"fleet_tp{ranks}_s"] = _median_s(
            partial(plan_fleet, COUNTS, WORK, speeds, 4 * REPLICAS), repeats
        )
        begin_s = time.thread_time()
        plan.plan()
        figures[f"fleet_tp{ranks}_checked_plan_s"] = time.thread_time() - begin_s
    model, states = ModelUnits(counts=COUNTS, tensors=()), [_replica(FLEET_RANKS)]
    one_s = _median_s(lambda: plan_job(model, WORK, states, 4), repeats)
    figures["one_replica_at_a_time_s"] = one_s * REPLICAS
    return {k: round(v, 4) for k, v in figures.items()}


def run(is_quick: bool) -> dict[str, Any]:
    """All figures and targets of this benchmark."""
    repeats, part = (5, 20) if is_quick else (21, 1)
    mismatches = _mismatches(ORACLE_DRAWS // part)
    roundings = _against_roundings(ROUNDING_DRAWS // part)
    job, fleet, scaling = _job_ms(repeats), _fleet_s(max(3, repeats // 3)), _scaling(repeats)
    tp72_ms, fleet_s = max(job.values()), fleet[f"fleet_tp{FLEET_RANKS}_s"]
    return {
        "bench": "planner",
        "hardware": _hardware(),
        "figures": {
            "oracle_draws": ORACLE_DRAWS // part,
            "oracle_mismatches": mismatches,
            "rounding_draws": ROUNDING_DRAWS // part,
            "roundings_beside_ours": roundings,
            **scaling,
            **job,
            **fleet,
        },
        "targets": [
            {
                "name": "planner_tp72_ms",
                "value": tp72_ms,
                "unit": "ms",
                "better": "lower",
                "target": TARGET_TP72_MS,
                "met": tp72_ms <= TARGET_TP72_MS,
                "beside": {"28,672 columns one by one": scaling["ranks_72_one_by_one_ms"]},
            },
            {
                "name": "planner_fleet_s",
                "value": fleet_s,
                "unit": "s",
                "better": "lower",
                "target": TARGET_FLEET_S,
                "met": fleet_s <= TARGET_FLEET_S,
                "beside": {"one replica at a time": fleet["one_replica_at_a_time_s"]},
            },
        ],
    }


def main() -> None:
    """Print one JSON object, or a short table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--quick", action="store_true", help="few draws, to see that it runs")
    args = parser.parse_args()
    result = run(args.quick)
    if args.json:
        print(json.dumps(result))
        return
    for name, value in result["figures"].items():
        print(f"{name:32} {json.dumps(value)}")


if __name__ == "__main__":
    main()
