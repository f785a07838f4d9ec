"""A rank without an engine: `python -m tests.support.fake_rank RUN_DIR RANK WORLD`.

It reports steps through the real probe and meets the other ranks in a barrier of files, so that it
can be stopped, killed or slowed for real. It runs until its stdin closes.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import sys
import time
from pathlib import Path

from ntp_core.observe import Op
from sidecar.probe.attach import attach
from tests.support.jobs import MODEL, plan_of, work_of

BUSY_S = 0.004
BARRIER_DIR = "barrier"


def main(run_dir: Path, rank: int, world: int) -> None:
    """Step until stdin closes."""
    observer = attach("fake", run_dir, hooks=False, global_rank=rank, world_size=world)
    plan = plan_of((tuple(range(1, world + 1)),))
    text = json.dumps({"plan": plan.to_json(), "model": MODEL.to_json()})
    observer.plan(1, plan.digest, text, work_of(plan)[rank])
    barrier = run_dir.parent / BARRIER_DIR
    barrier.mkdir(exist_ok=True)
    for step in itertools.count(1):
        begin_ns = time.monotonic_ns()
        observer.step_begin(step)
        busy_ns = _spin(BUSY_S * (rank + 1))
        observer.collective_begin(Op.ALL_REDUCE, 1, step, 4096)
        wait_ns = time.monotonic_ns()
        if not _meet(barrier, step, rank, world):
            return
        now_ns = time.monotonic_ns()
        observer.collective_end(Op.ALL_REDUCE, 1, step, now_ns - wait_ns)
        observer.step_end(step, now_ns - begin_ns, busy_ns, 64, 5.0 * 0.999**step)


def _spin(seconds: float) -> int:
    begin_ns = time.monotonic_ns()
    time.sleep(seconds)
    return time.monotonic_ns() - begin_ns


def _meet(barrier: Path, step: int, rank: int, world: int) -> bool:
    """True when all ranks have come to this step; False when stdin has closed."""
    (barrier / f"{step}-{rank}").touch()
    (barrier / f"{step - 2}-{rank}").unlink(missing_ok=True)
    while not all((barrier / f"{step}-{other}").exists() for other in range(world)):
        if _is_told_to_end(0.002):
            return False
    return not _is_told_to_end(0.0)


def _is_told_to_end(seconds: float) -> bool:
    ready, _, _ = select.select([sys.stdin], [], [], seconds)
    return bool(ready) and os.read(sys.stdin.fileno(), 1) == b""


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
