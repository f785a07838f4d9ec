"""Bodies that train a Hugging Face model over uneven ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ntp_core.cost import Work
from ntp_core.plan import Plan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.engine import Engine, StepOptions
from ntp_core.runtime.modules.hf import hf_loss_sum, parallelize_hf
from ntp_core.runtime.optim.adamw import PlaneAdamW, StateOptions
from ntp_core.units import ModelUnits
from tests.support.hf_models import batch, build
from tests.support.recording_observer import Call, RecordingObserver

LR, CLIP = 3e-3, 1.0


@dataclass(slots=True)
class Trained:
    """What one rank did: losses and norms by step, its local parameters after each step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: list[dict[str, torch.Tensor]] = field(default_factory=list)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    units: ModelUnits | None = None
    calls: list[Call] = field(default_factory=list)


def train_hf(
    comm: Comm,
    name: str,
    plan: Plan,
    steps: int,
    seq: int,
    split_heads: bool = False,
    recompute: dict[str, bool] | None = None,
    param_dtype: torch.dtype = torch.float32,
) -> Trained:
    """Train `steps` steps of the model of that name under a plan.

    Args:
        recompute: how layers are run again in backward (transformers' gradient checkpointing).
    """
    comm.observer = observer = RecordingObserver()
    parallel = parallelize_hf(build(name), plan, comm, split_heads=split_heads)
    if recompute is not None:
        checkpoint_layers(parallel.module, recompute)
    params = list(parallel.module.parameters())
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(params, lr=LR, foreach=False)
    if param_dtype != torch.float32:
        options = StateOptions(param_dtype=param_dtype)
        groups = [{"params": params}]
        optimizer = PlaneAdamW(groups, parallel.shards, comm, options, lr=LR, weight_decay=1e-2)
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
    told.grads = {
        s.spec.name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for s, p in parallel.shards
    }
    told.calls = observer.calls
    return told


def checkpoint_layers(model: Any, options: dict[str, bool]) -> None:
    """The model's own switch; transformers 5.24 renamed it and warns of the old name."""
    switch = getattr(model, "activation_checkpointing_enable", None)
    (switch or model.gradient_checkpointing_enable)(options)


def logits_hf(comm: Comm, name: str, plan: Plan, split_heads: bool = False) -> torch.Tensor:
    """The whole model's logits through its own forward, put together by the head's style."""
    parallel = parallelize_hf(build(name), plan, comm, split_heads=split_heads)
    comm.ensure_groups([r.ranks for r in plan.replicas])
    with torch.no_grad():
        logits: torch.Tensor = parallel.module(batch(1, 0, 2, 9)).logits
    return logits
