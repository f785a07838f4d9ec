"""Body that trains the model with copied KV heads and tells what each rank held."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ntp_core.faults import Fault
from ntp_core.observe import Reason
from ntp_core.plan import Plan
from ntp_core.proposal import Proposal
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.engine import Engine, StepOptions
from ntp_core.runtime.faults import Faults
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.sync.modes import SyncOptions
from tests.support.copies_model import LR, WORK, CopiesModel, Heads, T, batch_of
from tests.support.logical import Whole
from tests.support.recording_observer import Call, RecordingObserver


@dataclass(slots=True)
class Told:
    """What one rank did: losses, norms and own parameters by step, calls, whether changes held."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: list[Whole] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    changed: list[bool] = field(default_factory=list)


def train(
    comm: Comm,
    heads: Heads,
    plan: Plan,
    steps: int,
    sync: SyncOptions | None = None,
    faults: tuple[Fault, ...] = (),
    changes: tuple[tuple[int, Plan], ...] = (),
    micro_batches: int = 1,
) -> Told:
    """Train; before the step of a change its plan comes into force."""
    observer = RecordingObserver()
    comm.observer = observer
    group = TensorParallelGroup(comm, plan.replicas[plan.place(comm.rank)[0]].ranks)
    model = CopiesModel(heads, group, plan, comm.rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    options = StepOptions(check_every=1, sync=sync or SyncOptions(bucket_bytes=500))
    faulty = Faults(comm.rank, observer, faults)
    engine = Engine(model, optimizer, comm, WORK, options, faulty)
    told = Told()
    for step in range(1, steps + 1):
        for new in (p for s, p in changes if s == step):
            epoch = engine.plan.epoch + 1
            base = engine.plan.digest
            proposal = Proposal(
                base_digest=base, plan=new.with_epoch(epoch), reason=Reason.OPERATOR
            )
            told.changed.append(engine.change(proposal))
        _step(engine, model, told, micro_batches)
    told.calls = observer.calls
    return told


class DamagingComm(Comm):
    """Flips a bit of certain bytes wherever one rank receives them through `all_to_all`."""

    def __init__(self, comm: Comm, rank: int, target: bytes) -> None:
        self.__dict__.update(vars(comm))  # the same groups
        self._target = target
        self._is_victim = comm.rank == rank
        self.damaged = 0

    def all_to_all(self, send: list[torch.Tensor]) -> list[torch.Tensor]:
        """As it should be, but for the damage."""
        received = super().all_to_all(send)
        for data in received if self._is_victim else ():
            start = bytes(data.numpy().tobytes()).find(self._target)
            if start >= 0:
                data[start] ^= 1
                self.damaged += 1
        return received


def train_with_damage(comm: Comm, rank: int, target: bytes, **kwargs: Any) -> tuple[Told, int]:
    """Train while certain bytes that one rank receives are damaged; and how often they were."""
    damaging = DamagingComm(comm, rank, target)
    return train(damaging, **kwargs), damaging.damaged


def _step(engine: Engine, model: CopiesModel, told: Told, micro_batches: int) -> None:
    replicas, mine = engine.plan.replicas, engine.replica
    first, count = sum(r.batch for r in replicas[:mine]), replicas[mine].batch
    x, wanted = batch_of(engine.step + 1, first, count)
    batches = list(zip(x.chunk(micro_batches), wanted.chunk(micro_batches), strict=True))
    total = engine.plan.global_batch * T
    result = engine.train_step(batches, model.loss_sum, tokens=count * T, global_tokens=total)
    told.losses.append(result.loss)
    told.norms.append(result.grad_norm)
    held = zip(model.names, model.shards.params, strict=True)
    told.params.append({n: p.detach().clone() for n, p in held})
