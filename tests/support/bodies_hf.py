"""Bodies that train a Hugging Face model over uneven ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ntp_core.cost import Work
from ntp_core.plan import Plan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.engine import Engine, StepOptions
from ntp_core.runtime.modules.hf import hf_loss_sum, parallelize_hf
from ntp_core.units import ModelUnits
from tests.support.hf_models import batch, build

LR, CLIP = 3e-3, 1.0


@dataclass(slots=True)
class Trained:
    """What one rank did: losses and norms by step, its local parameters after each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: list[dict[str, torch.Tensor]] = field(default_factory=list)
    units: ModelUnits | None = None


def train_hf(
    comm: Comm, name: str, plan: Plan, steps: int, seq: int, split_heads: bool = False
) -> Trained:
    """Train `steps` steps of the model of that name under a plan."""
    parallel = parallelize_hf(build(name), plan, comm, split_heads=split_heads)
    params = list(parallel.module.parameters())
    optimizer = torch.optim.AdamW(params, lr=LR, foreach=False)
    work = Work(unit=dict.fromkeys(plan.counts, 1.0))
    engine = Engine(parallel, optimizer, comm, work, StepOptions(clip_norm=CLIP, check_every=1))
    loss_sum = hf_loss_sum(parallel)
    told = Trained(units=parallel.units)
    mine = engine.replica
    first, count = sum(r.batch for r in plan.replicas[:mine]), plan.replicas[mine].batch
    for step in range(1, steps + 1):
        result = engine.train_step(
            [batch(step, first, count, seq)],
            loss_sum,
            tokens=count * seq,
            global_tokens=plan.global_batch * seq,
        )
        told.losses.append(result.loss)
        told.norms.append(result.grad_norm)
        told.params.append({s.spec.name: p.detach().clone() for s, p in parallel.shards})
    return told


def logits_hf(comm: Comm, name: str, plan: Plan, split_heads: bool = False) -> torch.Tensor:
    """The whole model's logits through its own forward, put together by the head's style."""
    parallel = parallelize_hf(build(name), plan, comm, split_heads=split_heads)
    comm.ensure_groups([r.ranks for r in plan.replicas])
    with torch.no_grad():
        logits: torch.Tensor = parallel.module(batch(1, 0, 2, 9)).logits
    return logits
