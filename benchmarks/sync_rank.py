"""One rank of the sync benchmark: runs the tasks that have a place for it, arms taking turns.

    RANK=.. MASTER_ADDR=.. MASTER_PORT=.. python -m benchmarks.sync_rank TASK.json OUT.json

A round runs every arm once, a few repeats each; the next round begins with the next arm and goes
the other way. What is kept is, per arm and round, the seconds per repeat of the rank that took
longest.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks import even_models
from ntp_core.llama import LlamaConfig
from ntp_core.observe import NullObserver
from ntp_core.placement import place_plan
from ntp_core.plan import Plan
from ntp_core.planner import RankCost, min_max_shares
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.layers import TensorParallelGroup, copy_to_group, sum_over_group
from ntp_core.runtime.model import Llama
from ntp_core.runtime.shards import Shards, shards_of
from ntp_core.runtime.sync.modes import SyncMode, SyncOptions, gradient_sync, groups_of
from sidecar.demo.duty import DutyCycle

CONFIG = LlamaConfig(layers=4, width=240, heads=12, kv_heads=12, ffn=960, vocab=480)
OVERLAP_SEQ = 64
MLP_WIDTH, MLP_UNITS, MLP_UNIT, MLP_TOKENS = 512, 48, 64, 1024
SLOW_FACTOR = 2.0
MEASURE_STEPS = 10

Arm = Callable[[], object]


class CountingObserver(NullObserver):
    """Counts bytes that go into collectives, and collectives."""

    def __init__(self) -> None:
        self.num_bytes = self.collectives = 0

    def collective_begin(self, op: int, group: int, seq: int, num_bytes: int) -> None:
        """One more."""
        self.num_bytes += num_bytes
        self.collectives += 1


Seconds = dict[str, dict[str, list[Any]]]  # what -> arm -> by round


def interleave(comm: Comm, arms: dict[str, Arm], rounds: int, inner: int) -> Seconds:
    """Seconds per repeat, by arm and round.

    "wall" of the slowest rank, "cpu" of all ranks and their threads.
    """
    for arm in arms.values():
        arm()
    names = list(arms)
    wall = torch.zeros(len(names), rounds, dtype=torch.float64)
    cpu = torch.zeros_like(wall)
    for number in range(rounds):
        order = [(number + k) % len(names) for k in range(len(names))]
        for i in reversed(order) if number % 2 else order:  # no arm always follows the same other
            comm.all_reduce(torch.zeros(1), comm.world)
            begin, worked = time.perf_counter(), time.process_time()
            for _ in range(inner):
                arms[names[i]]()
            wall[i, number] = (time.perf_counter() - begin) / inner
            cpu[i, number] = (time.process_time() - worked) / inner
    comm.all_reduce(wall, comm.world, dist.ReduceOp.MAX)
    comm.all_reduce(cpu, comm.world)
    told = {"wall": wall, "cpu": cpu}
    return {k: dict(zip(names, t.tolist(), strict=True)) for k, t in told.items()}


def sync_alone(comm: Comm, plan: str, rounds: int, inner: int) -> dict[str, Any]:
    """The sync of gradients that are there already: modes and layouts."""
    naive = Plan.from_json(json.loads(plan))
    placed, model = place_plan(naive), CONFIG.units()
    kinds = {
        "segments": (placed, SyncOptions(overlap=False)),
        "contiguous": (naive, SyncOptions(overlap=False)),
        "reshard": (placed, SyncOptions(mode=SyncMode.RESHARD)),
    }
    arms: dict[str, Arm] = {}
    for name, (of, options) in kinds.items():
        shapes = {s.spec.name: s.shape for s in shards_of(model, of, comm.rank)}
        params = {n: nn.Parameter(torch.zeros(s)) for n, s in shapes.items()}
        shards = Shards(model, of, comm.rank, params)
        comm.ensure_groups(groups_of(shards, options.mode))
        arms[name] = _sync_arm(shards, gradient_sync(comm, shards, options))
    counts = {}
    for name, arm in arms.items():
        arm()
        comm.observer = observer = CountingObserver()
        arm()
        comm.observer = NullObserver()
        table = torch.zeros(len(comm.world), 2, dtype=torch.int64)
        table[comm.rank] = torch.tensor([observer.num_bytes, observer.collectives])
        counts[name] = comm.all_reduce(table, comm.world).tolist()
    return {"seconds": interleave(comm, arms, rounds, inner), "counts": counts}


def _sync_arm(shards: Shards, sync: Any) -> Arm:
    came = [torch.zeros_like(p) for p in shards.params]  # zeros stay zeros, however often summed

    def arm() -> None:
        for param, grad in zip(shards.params, came, strict=True):
            param.grad = grad
        sync.run()

    return arm


def overlap(comm: Comm, plan: str, rounds: int, inner: int) -> dict[str, Any]:
    """Forward, backward and sync of a whole model: during backward, after it, and resharded."""
    of = Plan.from_json(json.loads(plan))
    replica = of.place(comm.rank)[0]
    group = TensorParallelGroup(comm, of.replicas[replica].ranks)
    model = Llama(CONFIG, group, of, comm.rank, 0)
    ways = {
        "overlap_1MB": SyncOptions(bucket_bytes=1 << 20),
        "overlap_4MB": SyncOptions(bucket_bytes=4 << 20),
        "overlap": SyncOptions(),
        "after_4MB": SyncOptions(overlap=False, bucket_bytes=4 << 20),
        "after": SyncOptions(overlap=False),
        "reshard": SyncOptions(mode=SyncMode.RESHARD),
    }
    size = of.replicas[replica].batch
    tokens_BT = torch.randint(0, CONFIG.vocab, (size, OVERLAP_SEQ + 1))
    comm.broadcast_bytes(b"x" if comm.rank == 0 else None, 0)
    for mode in SyncMode:
        comm.ensure_groups(groups_of(model.shards, mode))
    torch.manual_seed(replica)
    arms = {
        name: _step_arm(model, tokens_BT, gradient_sync(comm, model.shards, options))
        for name, options in ways.items()
    }
    return {"seconds": interleave(comm, arms, rounds, inner)}


def _step_arm(model: Llama, tokens_BT: torch.Tensor, sync: Any) -> Arm:
    def arm() -> None:
        for param in model.parameters():
            param.grad = None
        loss = model.loss_sum(tokens_BT) / tokens_BT.numel()
        sync.arm()
        loss.backward()  # type: ignore[no-untyped-call]
        sync.run()

    return arm


def even(comm: Comm, rounds: int, inner: int) -> dict[str, Any]:
    """Whole steps at even degree: ours, DTensor's, and as little as works."""
    arms = {
        "ours": even_models.ours(comm),
        "ours_engine": even_models.ours(comm, engine=True),
        "dtensor": even_models.dtensor(comm.rank),
        "minimal": even_models.minimal(comm.rank),
    }
    losses = {n: arm() for n, arm in arms.items() if n != "ours_engine"}
    assert even_models.all_close(losses.values(), losses["minimal"]), losses
    return {"seconds": interleave(comm, dict(arms), rounds, inner)}


def uneven(comm: Comm, rounds: int, inner: int) -> dict[str, Any]:
    """One MLP on a whole core and on half a one: equal shares, and shares by measured speed."""
    group = TensorParallelGroup(comm, comm.world)
    equal = min_max_shares(MLP_UNITS, [RankCost(unit_s=1.0)] * 2)
    equal_arm = _mlp_arm(group, equal[comm.rank])
    free = interleave(comm, {"equal": equal_arm}, rounds, inner)
    slow = _slow_down() if comm.rank == 1 else None
    try:
        busy = torch.zeros(2, dtype=torch.float64)
        begin, waited = time.monotonic_ns(), comm.wait_ns
        for _ in range(MEASURE_STEPS):
            equal_arm()
        busy[comm.rank] = time.monotonic_ns() - begin - (comm.wait_ns - waited)
        comm.all_reduce(busy, comm.world)
        costs = [RankCost(unit_s=float(b) / n) for b, n in zip(busy, equal, strict=True)]
        shares = min_max_shares(MLP_UNITS, costs)
        arms = {"equal": equal_arm, "by_speed": _mlp_arm(group, shares[comm.rank])}
        taken = interleave(comm, arms, rounds, inner)
    finally:
        if slow is not None:
            slow.stop()
    return {
        "seconds": {c: taken[c] | {"equal_undisturbed": free[c]["equal"]} for c in taken},
        "shares": list(shares),
        "speed_ratio": float(busy[1] / busy[0]),
    }


def _slow_down() -> DutyCycle:
    """Stop and continue this process; the one that does it must not wait for the core it frees."""
    cores, nice = os.sched_getaffinity(0), os.getpriority(os.PRIO_PROCESS, 0)
    os.sched_setaffinity(0, range(os.cpu_count() or 1))
    try:  # children inherit both
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, -20)
        return DutyCycle(os.getpid(), SLOW_FACTOR)
    finally:
        os.sched_setaffinity(0, cores)
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, nice)


def _mlp_arm(group: TensorParallelGroup, units: int) -> Arm:
    torch.manual_seed(0)
    up = nn.Parameter(0.02 * torch.randn(units * MLP_UNIT, MLP_WIDTH))
    down = nn.Parameter(0.02 * torch.randn(MLP_WIDTH, units * MLP_UNIT))
    x = torch.randn(MLP_TOKENS, MLP_WIDTH, requires_grad=True)

    def arm() -> None:
        x.grad = up.grad = down.grad = None
        h = torch.relu(copy_to_group(x, group) @ up.T) @ down.T
        sum_over_group(h, group).square().sum().backward()  # type: ignore[no-untyped-call]

    return arm


TASKS = {"sync": sync_alone, "overlap": overlap, "even": even, "uneven": uneven}


def main() -> None:
    """Run the task; rank 0 writes what it found."""
    task = json.loads(Path(sys.argv[1]).read_text())
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    dist.init_process_group("gloo")  # for the arms that use torch's own groups
    comm = Comm.connect(rank, world_size, timeout_s=300.0)
    result = TASKS[task.pop("kind")](comm, **task)
    if rank == 0:
        Path(sys.argv[2]).write_text(json.dumps(result))
    comm.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
