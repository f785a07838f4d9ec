"""What a unit really costs on this machine: seconds, measured before the first step.

Counting multiplications leaves out what every rank does whatever its share (norms, residuals,
optimizer calls, Python itself), and matrix products of different shapes do not run at the same
rate. So one rank trains a few steps by itself with different shares and takes differences. Only
ratios between the results matter; shares, plans and losses of the job do not depend on them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from ntp_core.cost import Work
from ntp_core.job import TrainConfig
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.model import Llama
from ntp_core.units import UnitKind

REPEATS = 3
LEAST_S = 1e-9


def measure_work(config: TrainConfig, degree: int, batch: int) -> Work:
    """Seconds per sequence of one unit of each kind, and of what every rank does anyway.

    Args:
        degree: tensor-parallel degree whose shares are the measured ones.
        batch: sequences per step of one replica.
    """
    counts = config.model.units().counts
    usual = {k: max(2, n // degree) for k, n in counts.items()}
    base = _step_s(config, usual, batch)
    unit = {}
    for kind, share in usual.items():
        less = _step_s(config, {**usual, kind: 1}, batch)
        unit[kind] = max(LEAST_S, (base - less) / (share - 1)) / batch
    fixed = base / batch - sum(unit[k] * share for k, share in usual.items())
    return Work(unit=unit, rank=max(0.0, fixed))


def _step_s(config: TrainConfig, shares: Mapping[UnitKind, int], batch: int) -> float:
    """Fastest of a few forward, backward and optimizer passes of one rank alone, in seconds."""
    counts = config.model.units().counts
    layouts = {k: Layout.contiguous((shares[k], n - shares[k])) for k, n in counts.items()}
    plan = Plan.build(counts, [ReplicaPlan(ranks=(0, 1), layouts=layouts, batch=batch)])
    group = TensorParallelGroup(Comm(0, 1), (0,))  # alone: nothing is summed, nobody waits
    model = Llama(config.model, group, plan, 0, config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=True)
    tokens_BT = torch.zeros(batch, config.seq + 1, dtype=torch.int64)
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        model.loss_sum(tokens_BT).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        times.append(time.perf_counter() - begin)
    return min(times[1:])  # the first one warms up
