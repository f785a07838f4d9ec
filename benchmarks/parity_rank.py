"""One rank of the parity benchmark: trains every case that has a place for it, in turn.

    RANK=.. MASTER_ADDR=.. MASTER_PORT=.. python -m benchmarks.parity_rank CASES.json OUT_DIR

Processes start once for all cases; each case has its own process group. What a rank holds at the
end, and its fingerprints at each step, go into OUT_DIR.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore

from benchmarks.parity_models import batch, build
from ntp_core.cost import Work
from ntp_core.plan import Plan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.engine import Engine, StepOptions
from ntp_core.runtime.modules.hf import hf_loss_sum, parallelize_hf

LR, CLIP = 1e-3, 1.0
EPS = 1e-6
"""Of AdamW. Where a gradient is almost nothing its rounding decides the direction of a step; with
1e-8, the usual, that alone would be what is measured."""


def run_case(case: dict[str, Any], comm: Comm) -> dict[str, Any]:
    """Train one case on this rank."""
    plan, seq = Plan.from_json(case["plan"]), case["seq"]
    split = bool(case.get("split_heads"))
    parallel = parallelize_hf(build(case["model"], case["layers"]), plan, comm, split_heads=split)
    optimizer = torch.optim.AdamW(parallel.module.parameters(), lr=LR, eps=EPS, foreach=False)
    work = Work(unit=dict.fromkeys(plan.counts, 1.0))
    engine = Engine(parallel, optimizer, comm, work, StepOptions(clip_norm=CLIP, check_every=0))
    loss_sum = hf_loss_sum(parallel)
    first = sum(r.batch for r in plan.replicas[: engine.replica])
    count = plan.replicas[engine.replica].batch
    losses, blocks, begin = [], [], time.monotonic()
    for step in range(1, case["steps"] + 1):
        result = engine.train_step(
            [batch(step, first, count, seq)],
            loss_sum,
            tokens=count * seq,
            global_tokens=plan.global_batch * seq,
        )
        losses.append(result.loss)
        blocks.append(_blocks(parallel))
    held = {s.spec.name: (p.detach().clone(), s.logical_index()) for s, p in parallel.shards}
    return {
        "losses": losses,
        "blocks": blocks,
        "held": held,
        "units": parallel.units.to_json(),
        "train_s": time.monotonic() - begin,
    }


def _blocks(parallel: Any) -> dict[str, str]:
    """SHA-256 of every block this rank holds: an oracle beside our own fingerprints."""
    found = {}
    for shard, param in parallel.shards:
        for block in shard.blocks:
            digest = hashlib.sha256()
            for view in shard.views(param.detach(), block):
                digest.update(view.contiguous().numpy().tobytes())
            found[f"{shard.spec.name}/{block}"] = digest.hexdigest()[:16]
    return found


def main() -> None:
    """Run all cases."""
    cases, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    rank, torch_threads = int(os.environ["RANK"]), 1
    torch.set_num_threads(torch_threads)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        None,
        False,
        timeout=timedelta(seconds=600),
    )
    for number, case in enumerate(cases):
        world = len(Plan.from_json(case["plan"]).ranks)
        if rank >= world:
            continue
        begin = time.monotonic()
        prefix = PrefixStore(f"case-{number}", store)
        comm = Comm.connect(rank, world, timeout_s=600, store=prefix)
        try:
            result = run_case(case, comm)
        finally:
            comm.close()
        result["seconds"] = time.monotonic() - begin
        torch.save(result, out / f"{number}-{rank}.pt")


if __name__ == "__main__":
    main()
