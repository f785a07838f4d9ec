"""Train with a plan for ranks of unequal speed.

    ntp-sidecar run --autopilot act -- python examples/uneven_job.py

Two replicas: three ranks of which the last has half the speed, and two equal ranks. Shares and
batches follow the speeds; the loss does not depend on them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from ntp_core.job import JobConfig, TrainConfig, even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.replan import rebalance
from ntp_core.runtime.launch import ExitSignals, LocalRanks

SPEEDS = {0: 1.0, 1: 1.0, 2: 0.5, 3: 1.0, 4: 1.0}


def main() -> int:
    """Start one process per rank and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seq", type=int, default=64)
    args = parser.parse_args()
    signals = ExitSignals()

    model = LlamaConfig()
    plan = rebalance(even_plan(model, (3, 2), batch=10), model.work(args.seq), SPEEDS)
    for index, r in enumerate(plan.replicas):
        shares = {str(kind): layout.shares for kind, layout in r.layouts.items()}
        print(f"replica {index}: ranks {r.ranks}, batch {r.batch}, units {shares}")
    train = TrainConfig(model=model, seq=args.seq, lr=1e-3)
    job = JobConfig(train=train, plan=replace(plan, epoch=1), steps=args.steps)

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "job.json")
        config.write_text(job.to_json())
        losses = Path(folder, "losses.json")
        command = [sys.executable, "-m", "ntp_core.runtime.train", "--config", str(config)]
        command += ["--losses", str(losses)]
        with LocalRanks(command, len(SPEEDS)) as ranks:
            codes = ranks.wait(timeout_s=600, look=signals.leave)
        if not any(codes):
            told = json.loads(losses.read_text())
            print(f"{len(told)} steps, loss {told[0]:.3f} -> {told[-1]:.3f}")
    print("exit codes", codes)
    return next((c if c > 0 else 128 - c for c in codes if c), 0)  # as a shell says it


if __name__ == "__main__":
    sys.exit(main())
