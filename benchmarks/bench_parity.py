"""Is an uneven job the same training as one process? `python -m benchmarks.bench_parity --json`

For small models of four real architectures and several uneven layouts: largest relative difference
of the loss and of any parameter tensor after 50 steps against one process in fp32, beside the same
figure for an even layout of the same degree and the same batches, which says how far rounding alone
carries. Replicas are compared at every step by SHA-256 of every block. Last, 128 heads on 30 and 28
ranks, forward, as in `parity_heads`.

A parameter without influence on the loss (a bias of keys: softmax does not see it) has rounding for
a gradient, and Adam makes full steps of it: its difference says nothing and is left out.
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
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.parity_heads import figures as heads_figures
from benchmarks.parity_models import MODELS, batch, build
from benchmarks.parity_rank import CLIP, EPS, LR
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import RankCost, min_max_shares
from ntp_core.runtime.launch import LocalRanks
from ntp_core.runtime.modules.hf import hf_counts

# layout -> degrees and batches of its replicas, and of the even control
LAYOUTS: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "4_to_3": ((4, 3), (4, 3), (4, 4)),
    "4_to_2_3": ((4, 2, 3), (3, 1, 2), (4, 4, 4)),
    "8_to_7": ((8, 7), (4, 3), (8, 8)),
    "6_to_5_4_6": ((5, 4, 6), (2, 1, 3), (6, 6, 6)),
}
MANY_RANKS = 12  # beyond, a layer instead of two: few cores share all processes
SEQ = 8
TARGET = 1.5
NO_INFLUENCE = 1e-6  # of the gradient's norm, in float64
Dense = tuple[list[float], dict[str, torch.Tensor], set[str]]


def plan_for(model: str, degrees: Sequence[int], batches: Sequence[int]) -> Plan:
    """Shares as equal as units allow."""
    counts = hf_counts(build(model, 1).config, mlp_block=8, vocab_block=16)
    replicas, first = [], 0
    for degree, share in zip(degrees, batches, strict=True):
        layouts = {
            k: Layout.contiguous(min_max_shares(n, [RankCost(unit_s=1.0)] * degree))
            for k, n in counts.items()
        }
        ranks = tuple(range(first, first + degree))
        replicas.append(ReplicaPlan(ranks=ranks, layouts=layouts, batch=share))
        first += degree
    return Plan.build(counts, replicas)


@cache
def dense(model_name: str, layers: int, sequences: int, steps: int) -> Dense:
    """The same training in one process, with none of our code: losses, parameters, and which of
    them have no influence."""
    model = build(model_name, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, eps=EPS, foreach=False)
    losses = []
    for step in range(1, steps + 1):
        tokens = batch(step, 0, sequences, SEQ)
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(float(loss.detach()))
    params = {n: p.detach() for n, p in model.named_parameters()}
    return losses, params, without_influence(model_name, layers, sequences)


def without_influence(model_name: str, layers: int, sequences: int) -> set[str]:
    """Parameters whose gradient is nothing but rounding."""
    model = build(model_name, layers).double()
    tokens = batch(1, 0, sequences, SEQ)
    F.cross_entropy(model(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    norms = {n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None}
    total = sum(v * v for v in norms.values()) ** 0.5
    return {n for n, v in norms.items() if v < NO_INFLUENCE * total}


def run_all(cases: list[dict[str, Any]], folder: Path) -> None:
    """All cases in one set of processes."""
    (folder / "cases.json").write_text(json.dumps(cases))
    world = max(len(Plan.from_json(c["plan"]).ranks) for c in cases)
    command = [sys.executable, "-m", "benchmarks.parity_rank", str(folder / "cases.json")]
    with LocalRanks([*command, str(folder)], world) as ranks:
        codes = ranks.wait(timeout_s=7200)
    if any(codes):
        raise RuntimeError(f"ranks ended with {codes}")


def judge(case: dict[str, Any], number: int, folder: Path) -> dict[str, Any]:
    """Differences to one process, and the share of steps with all replicas bit-identical."""
    plan = Plan.from_json(case["plan"])
    told = [torch.load(folder / f"{number}-{g}.pt", weights_only=False) for g in plan.ranks]
    losses, params, ignored = dense(case["model"], case["layers"], plan.global_batch, case["steps"])
    loss_diff = max(abs(a - b) / abs(b) for a, b in zip(told[0]["losses"], losses, strict=True))
    first = told[: len(plan.replicas[0].ranks)]
    diffs = {n: _param_diff(n, p, first) for n, p in params.items() if n not in ignored}
    worst = max(diffs, key=diffs.__getitem__)
    same = [_identical(plan, [t["blocks"][s] for t in told]) for s in range(case["steps"])]
    return {
        "loss": loss_diff,
        "param": diffs[worst],
        "worst": worst,
        "identical": statistics.fmean(same),
        "seconds": max(t["seconds"] for t in told),
        "train_s": max(t["train_s"] for t in told),
    }


def _param_diff(name: str, whole: torch.Tensor, told: list[dict[str, Any]]) -> float:
    """Relative distance of one tensor, put together from the first replica's ranks."""
    seen, square = 0, 0.0
    units = {t["name"]: t for t in told[0]["units"]["tensors"]}[name]
    for t in told[:1] if units["kind"] is None else told:
        local, index = t["held"][name]
        part = whole.index_select(units["dim"], index)
        square += float((local.double() - part.double()).square().sum())
        seen += local.numel()
    assert seen == whole.numel(), f"{name}: {seen} of {whole.numel()} elements"
    return (square**0.5) / max(float(whole.double().norm()), 1e-30)


def _identical(plan: Plan, blocks: list[dict[str, str]]) -> bool:
    """Every block has one digest, whichever rank of whichever replica holds it."""
    known: dict[str, str] = {}
    for mine in blocks:
        for key, digest in mine.items():
            if known.setdefault(key, digest) != digest:
                return False
    return len(plan.replicas) > 0


def targets(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for parity and one for identity of each model and layout."""
    rows = []
    for key, r in results.items():
        uneven, even = (max(r[arm]["param"], r[arm]["loss"]) for arm in ("uneven", "even"))
        rows.append(parity_row(key, uneven, even))
        rows.append(
            {
                "name": f"identical_{key}",
                "value": r["uneven"]["identical"],
                "unit": "of steps",
                "better": "higher",
                "target": 1.0,
                "met": r["uneven"]["identical"] == 1.0,
                "beside": {},
            }
        )
    return rows


def parity_row(key: str, uneven: float, even: float) -> dict[str, Any]:
    """How many times as far from one process as the even control."""
    ratio = uneven / max(even, 1e-12)
    return {
        "name": f"parity_{key}",
        "value": ratio,
        "unit": "x even control",
        "better": "lower",
        "target": TARGET,
        "met": ratio <= TARGET,
        "beside": {"uneven": uneven, "even": even},
    }


def cases_of(steps: int, quick: bool, only: Sequence[str]) -> dict[tuple[str, str], dict[str, Any]]:
    """(model and layout, arm) -> what the ranks train."""
    cases = {}
    layouts = list(LAYOUTS.items())[: 2 if quick else None]
    for model in MODELS:
        for name, (degrees, batches, control) in layouts:
            key = f"{model}_{name}"
            if only and key not in only:
                continue
            for arm, d in (("uneven", degrees), ("even", control)):
                plan = plan_for(model, d, batches).to_json()
                cases[key, arm] = {
                    "model": model,
                    "layers": 2 if sum(control) <= MANY_RANKS else 1,
                    "plan": plan,
                    "steps": steps,
                    "seq": SEQ,
                }
    return cases


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="5 steps, two layouts")
    parser.add_argument("--steps", type=int)
    parser.add_argument("only", nargs="*", help="models with layouts, as in llama_4_to_3")
    args = parser.parse_args()
    steps = args.steps or (5 if args.quick else 50)
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other
    cases = cases_of(steps, args.quick, args.only)
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        run_all(list(cases.values()), Path(folder))
        for number, ((key, arm), case) in enumerate(cases.items()):
            results.setdefault(key, {})[arm] = judge(case, number, Path(folder))
    heads = heads_figures()
    rows = targets(results) + [parity_row(k, f["uneven"], f["even"]) for k, f in heads.items()]
    hardware = f"{os.cpu_count()} cores, {platform.machine()}, gloo, fp32"
    figures = {**results, **heads, "steps": steps}
    report = {"bench": "parity", "hardware": hardware, "figures": figures, "targets": rows}
    if args.json:
        print(json.dumps(report))
        return
    for row in rows:
        print(f"{row['name']:<28} {row['value']:.3g} {row['unit']} {row['beside']}")


if __name__ == "__main__":
    main()
