"""128 query heads on 30 and 28 ranks compute what the whole model does, forward and backward.

Ranks run in turn in this process: the project's layers on real shards, partial sums added here. The
oracles are the whole models in float64: transformers' own, and plain torch for the built-in one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from ntp_core.job import TrainConfig, even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import RankCost, min_max_shares
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.model import Llama
from ntp_core.runtime.modules.hf import hf_counts, hf_loss_sum, parallelize_hf
from ntp_core.units import ModelUnits
from tests.support.dense_llama import DenseTrainer
from tests.support.logical import places_of
from tests.support.tiny_job import text_for
from tests.support.turns import TurnsComm, in_turns

HEADS, HEAD_DIM, WIDTH, VOCAB, COLUMNS = 128, 4, 128, 60, 90
BATCH, SEQ = 2, 7
LOSS_TOLERANCE = 2e-6  # relative
TOLERANCE = 2e-5  # relative to the tensor's norm


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # tiny tensors: threads would only wait for each other


def whole_model(kv_heads: int) -> nn.Module:
    """Two layers, the same weights every time, wide enough that heads differ."""
    transformers.logging.set_verbosity_error()
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        intermediate_size=COLUMNS,
        max_position_embeddings=32,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    config._attn_implementation = "eager"
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()


def tokens() -> torch.Tensor:
    """The same batch every time."""
    return torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(4))


@cache
def oracle(kv_heads: int) -> tuple[float, torch.Tensor, dict[str, torch.Tensor]]:
    """Sum of losses, logits and gradients of the whole model in float64."""
    model: Any = whole_model(kv_heads).double()
    logits = model(tokens()[:, :-1]).logits
    loss = F.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten(), reduction="sum")
    loss.backward()
    return float(loss.detach()), logits.detach(), {n: p.grad for n, p in model.named_parameters()}


def spread(counts: dict[Any, int], degree: int) -> Plan:
    """One replica, shares as equal as whole units allow."""
    layouts = {
        k: Layout.contiguous(min_max_shares(n, [RankCost(unit_s=1.0)] * degree))
        for k, n in counts.items()
    }
    return Plan.build(counts, [ReplicaPlan(ranks=tuple(range(degree)), layouts=layouts, batch=1)])


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank computed."""

    loss: float
    logits: torch.Tensor
    grads: dict[str, torch.Tensor]
    units: ModelUnits
    sums: int


def forward_and_backward(comm: TurnsComm, kv_heads: int, plan: Plan, *, split: bool) -> Told:
    """One pass of a rank's part."""
    parallel = parallelize_hf(whole_model(kv_heads), plan, comm, split_heads=split)
    with torch.no_grad():
        logits = parallel.module(tokens()[:, :-1]).logits
    loss = hf_loss_sum(parallel)(tokens())
    loss.backward()  # type: ignore[no-untyped-call]
    grads = {
        s.spec.name: torch.zeros_like(p) if p.grad is None else p.grad for s, p in parallel.shards
    }
    return Told(float(loss.detach()), logits, grads, parallel.units, comm.sums)


def whole_grads(told: list[Told], plan: Plan) -> dict[str, torch.Tensor]:
    """Gradients put together; those of copies are parts and add up."""
    found = {}
    for t in told[0].units.tensors:
        if t.kind is None:
            assert not t.partial_grad
            found[t.name] = told[0].grads[t.name]
            continue
        total = torch.zeros(t.shape)
        for rank, one in enumerate(told):
            total.index_add_(
                t.dim, torch.tensor(places_of(plan, t, rank)).long(), one.grads[t.name]
            )
        found[t.name] = total
    return found


def distance(ours: torch.Tensor, right: torch.Tensor) -> float:
    """Of the whole tensors, relative."""
    return float((ours.double() - right).norm() / right.norm())


@pytest.mark.parametrize("degree", [30, 28])
@pytest.mark.parametrize(
    ("kv_heads", "split"),
    [(128, False), (8, True), (16, True), (1, True), (8, False)],
    ids=["mha", "gqa-8", "gqa-16", "mqa", "gqa-8-whole"],
)
def test_heads_128_compute_what_the_whole_model_does(
    degree: int, kv_heads: int, *, split: bool
) -> None:
    """Loss, logits and every gradient, whether KV heads are split over ranks or not."""
    counts = hf_counts(whole_model(kv_heads).config, mlp_block=2, vocab_block=1, split_heads=split)
    plan = spread(counts, degree)
    told = in_turns(degree, lambda comm: forward_and_backward(comm, kv_heads, plan, split=split))
    loss, logits, grads = oracle(kv_heads)
    for t in told:
        assert t.loss == told[0].loss == pytest.approx(loss, rel=LOSS_TOLERANCE)
        assert distance(t.logits, logits) <= TOLERANCE
        assert t.sums == told[0].sums
    ours = whole_grads(told, plan)
    assert set(grads) == set(ours)
    assert {n for n in grads if distance(ours[n], grads[n]) > TOLERANCE} == set()
    held = {len(places_of(plan, told[0].units.tensor(Q), g)) // HEAD_DIM for g in range(degree)}
    assert held == ({4, 5} if kv_heads == HEADS or split else {0, 16})


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("degree", [30, 28])
def test_heads_128_of_the_built_in_model_compute_what_the_whole_one_does(degree: int) -> None:
    """Loss and gradients of the built-in Llama, beside plain torch."""
    model = LlamaConfig(
        heads=HEADS, kv_heads=HEADS, width=512, ffn=120, mlp_block=2, vocab=60, vocab_block=1
    )
    config = TrainConfig(model=model, seq=SEQ, seed=5)
    dense = DenseTrainer(config, text_for(config), torch.float64)
    loss = dense.loss(text_for(config).batch(1, 0, BATCH))
    loss.backward()  # type: ignore[no-untyped-call]
    plan = even_plan(model, (degree,), BATCH)

    def body(comm: TurnsComm) -> tuple[float, dict[str, torch.Tensor]]:
        group = TensorParallelGroup(comm, plan.replicas[0].ranks)
        part = Llama(model, group, plan, comm.rank, config.seed)
        total = part.loss_sum(text_for(config).batch(1, 0, BATCH))
        (total / (BATCH * SEQ)).backward()  # type: ignore[no-untyped-call]
        grads = {s.spec.name: p.grad for s, p in part.shards if p.grad is not None}
        return float(total.detach()) / (BATCH * SEQ), grads

    told = in_turns(degree, body)
    assert all(t[0] == told[0][0] for t in told)
    assert told[0][0] == pytest.approx(float(loss.detach()), rel=LOSS_TOLERANCE)
    for t in model.units().tensors:
        right = dense.weights[t.name].grad
        assert right is not None
        if t.kind is None:
            assert distance(told[0][1][t.name], right) <= TOLERANCE
            continue
        ours = torch.zeros(t.shape)
        for rank, (_, grads) in enumerate(told):
            ours.index_add_(t.dim, torch.tensor(places_of(plan, t, rank)).long(), grads[t.name])
        assert distance(ours, right) <= TOLERANCE, t.name
