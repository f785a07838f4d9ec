"""Gradient sync and even layers: `python -m benchmarks.bench_sync [--json] [--quick]`.

Counts come from the plans and, where ranks are started, from what the collectives were given.
Seconds are medians over rounds with quartiles; arms take turns in every round, so that all see the
same load, and only ratios between them mean anything. Ratios of times are medians over rounds of
the ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.sync_rank import CONFIG, SLOW_FACTOR
from ntp_core.job import even_plan
from ntp_core.paper_sync import reshard_traffic
from ntp_core.placement import contiguous, place_plan, sync_shape
from ntp_core.plan import Plan
from ntp_core.runtime.launch import LocalRanks
from ntp_core.traffic import Traffic, least_bytes, segment_traffic

LAYOUTS = {"4_to_4": (4, 4), "4_to_3": (4, 3), "4_to_2_3": (4, 2, 3), "6_to_5": (6, 5)}
SMALLER = {"3_to_1_2": (3, 1, 2)}  # what of several degrees fits the processes
MAX_RANKS = 8
TIMEOUT_S = 600.0


def run_task(world: int, **task: Any) -> dict[str, Any]:
    """Start ranks, run one task, and give back what rank 0 found."""
    with tempfile.TemporaryDirectory() as folder:
        todo, out = Path(folder, "task.json"), Path(folder, "out.json")
        todo.write_text(json.dumps(task))
        command = [sys.executable, "-m", "benchmarks.sync_rank", str(todo), str(out)]
        with LocalRanks(command, world) as ranks:
            codes = ranks.wait(TIMEOUT_S)
        if any(codes):
            raise RuntimeError(f"{task['kind']}: ranks ended with {codes}")
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def counted(plan: Plan) -> dict[str, Any]:
    """Groups, messages, collectives and bytes of each way, without running it."""
    model, placed = CONFIG.units(), place_plan(plan)
    shares = [{k: v.shares for k, v in r.layouts.items()} for r in plan.replicas]
    bound = least_bytes(plan, model)
    figures: dict[str, Any] = {"bound_bytes_largest": max(bound.values())}
    ways = {
        "segments": segment_traffic(placed, model),
        "contiguous": segment_traffic(plan, model),
        "reshard": reshard_traffic(placed, model),
    }
    for name, traffic in ways.items():
        figures[name] = _traffic(traffic)
    layouts = {
        "segments": [tuple(r.layouts[k] for r in placed.replicas) for k in plan.counts],
        "contiguous": [contiguous([s[k] for s in shares]) for k in plan.counts],
    }
    for name, of_kinds in layouts.items():
        shape = sync_shape(of_kinds)
        figures[name] |= {
            "groups": shape.groups,
            "segments": shape.segments,
            "off_lane_units": shape.off_lane,
            "sums_of_busiest_rank": shape.busiest,
        }
    return figures


def _traffic(of_rank: dict[int, Traffic]) -> dict[str, int]:
    every = of_rank.values()
    return {
        "bytes_largest": max(t.num_bytes for t in every),
        "bytes_all": sum(t.num_bytes for t in every),
        "messages": sum(t.messages for t in every),
        "collectives_largest": max(t.collectives for t in every),
    }


def timed(result: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Median and quartiles of each arm, and the processor time of all ranks together, in ms."""
    table = {}
    cpu = result["seconds"]["cpu"]
    for name, seconds in result["seconds"]["wall"].items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        table[name] = {"median_ms": 1e3 * middle, "q1_ms": 1e3 * low, "q3_ms": 1e3 * high}
        table[name]["cpu_ms"] = 1e3 * statistics.median(cpu[name])
    return table


def ratio(result: dict[str, Any], arm: str, beside: str) -> dict[str, float]:
    """Median and quartiles over rounds of one arm's time over another's; and of processor time."""
    wall, cpu = (
        [a / b for a, b in zip(of[arm], of[beside], strict=True)]
        for of in (result["seconds"]["wall"], result["seconds"]["cpu"])
    )
    low, middle, high = statistics.quantiles(wall, n=4)
    return {"median": middle, "q1": low, "q3": high, "cpu": statistics.median(cpu)}


def measure(rounds: int) -> dict[str, Any]:
    """All figures."""
    figures: dict[str, Any] = {"load_before": os.getloadavg()}
    sync: dict[str, Any] = {}
    bytes_ratio = 1.0
    for name, degrees in {**LAYOUTS, **SMALLER}.items():
        plan = even_plan(CONFIG, degrees, batch=2 * sum(degrees))
        sync[name] = {"counted": counted(plan)}
        if sum(degrees) > MAX_RANKS:
            sync[name]["seconds"] = None
            sync[name]["reason"] = f"{sum(degrees)} ranks; at most {MAX_RANKS} are started"
            continue
        text = json.dumps(plan.to_json())
        result = run_task(sum(degrees), kind="sync", plan=text, rounds=rounds, inner=3)
        bound = least_bytes(plan, CONFIG.units())
        sent = [num_bytes for num_bytes, _ in result["counts"]["segments"]]
        bytes_ratio = max(bytes_ratio, *(b / bound[g] for g, b in enumerate(sent)))
        sync[name]["seconds"] = timed(result)
        for arm in ("reshard", "contiguous"):
            sync[name][f"segments_vs_{arm}"] = ratio(result, "segments", arm)
    figures["sync"], figures["bytes_vs_bound_ratio"] = sync, bytes_ratio
    figures["overlap"] = {}
    for degrees in ((2, 2), (2, 1), (3, 2)):
        text = json.dumps(place_plan(even_plan(CONFIG, degrees, 2 * sum(degrees))).to_json())
        result = run_task(sum(degrees), kind="overlap", plan=text, rounds=rounds, inner=3)
        arms = ("overlap", "overlap_1MB", "overlap_4MB", "after_4MB", "reshard")
        vs = {f"{arm}_vs_after": ratio(result, arm, "after") for arm in arms}
        figures["overlap"]["_to_".join(map(str, degrees))] = {"seconds": timed(result), **vs}
    result = run_task(4, kind="even", rounds=2 * rounds, inner=5)
    figures["even"] = {"seconds": timed(result)}
    for arm in ("dtensor", "minimal"):
        figures["even"][f"ours_vs_{arm}"] = ratio(result, "ours", arm)
        figures["even"][f"engine_vs_{arm}"] = ratio(result, "ours_engine", arm)
    figures["uneven"] = measure_uneven(rounds)
    figures["load_after"] = os.getloadavg()
    return figures


def measure_uneven(rounds: int) -> dict[str, Any]:
    """Gain of shares by measured speed where one of two ranks takes twice the time for its work.

    Ideal is what shares of any fraction would bring: (K + 1) / 2 where one of two ranks was
    measured K times slower, in the same run.
    """
    if (os.cpu_count() or 1) < 2 or not hasattr(os, "sched_setaffinity"):
        return {"gain": None, "reason": "needs two cores that ranks can be pinned to"}
    result = run_task(2, kind="uneven", rounds=2 * rounds, inner=4)
    return {
        "seconds": timed(result),
        "gain": ratio(result, "equal", "by_speed"),
        "ideal_gain": (1 + result["speed_ratio"]) / 2,
        "shares": result["shares"],
        "speed_ratio": result["speed_ratio"],
        "slow_factor": SLOW_FACTOR,
    }


def targets(figures: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures that have a target."""
    even, uneven = figures["even"], figures["uneven"]
    gain = uneven["gain"]["median"] / uneven["ideal_gain"] if uneven["gain"] else None
    medians = {k: v["median_ms"] for k, v in even["seconds"].items()}
    beside_gain = {"equal shares": 1 / uneven["ideal_gain"]} if uneven["gain"] else {}
    rows = [
        ("even_vs_dtensor_ratio", even["ours_vs_dtensor"]["median"], "lower", 0.70, medians),
        ("even_vs_minimal_ratio", even["ours_vs_minimal"]["median"], "lower", 1.05, medians),
        ("uneven_vs_ideal_ratio", gain, "higher", 0.95, beside_gain),
        ("bytes_vs_bound_ratio", figures["bytes_vs_bound_ratio"], "lower", 1.0, {}),
    ]
    return [
        {
            "name": name,
            "value": value,
            "unit": "x",
            "better": better,
            "target": target,
            "met": None if value is None else (value <= target) == (better == "lower"),
            "beside": beside,
            **({"reason": uneven["reason"]} if value is None else {}),
        }
        for name, value, better, target, beside in rows
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="few rounds, to see that it runs")
    args = parser.parse_args(argv)
    figures = measure(4 if args.quick else 12)
    hardware = f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, gloo"
    report = {
        "bench": "sync",
        "hardware": hardware,
        "figures": figures,
        "targets": targets(figures),
    }
    if args.json:
        print(json.dumps(report))
        return
    print(json.dumps(figures, indent=1))
    for row in report["targets"]:
        print(f"{row['name']:<24} {row['value']} (target {row['target']}, met: {row['met']})")


if __name__ == "__main__":
    main()
