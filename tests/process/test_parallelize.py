"""Real models over uneven ranks against the same model whole in one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F

from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.modules.hf import hf_counts
from ntp_core.units import UnitKind
from tests.support.bodies_hf import CLIP, LR, Trained, logits_hf, train_hf
from tests.support.hf_models import MODELS, VOCAB, batch, build
from tests.support.logical import assemble
from tests.support.rank_pool import RankPool
from tests.support.recording_observer import calls_of

STEPS, SEQ = 4, 12
MLP_BLOCK, VOCAB_BLOCK = 8, 16
LAYOUTS: dict[str, list[dict[str, tuple[int, ...]]]] = {
    "1": [{"attention": (3,), "mlp": (5,), "vocab": (7,)}],
    "3": [{"attention": (2, 0, 1), "mlp": (1, 4, 0), "vocab": (0, 3, 4)}],
    "2+3": [
        {"attention": (2, 1), "mlp": (2, 3), "vocab": (4, 3)},
        {"attention": (1, 0, 2), "mlp": (0, 2, 3), "vocab": (3, 3, 1)},
    ],
}
SPLIT_LAYOUTS: dict[str, list[dict[str, tuple[int, ...]]]] = {
    "4 of 6 query heads": [{"attention": (1, 2, 2, 1), "mlp": (1, 2, 1, 1), "vocab": (2, 2, 2, 1)}],
    "5+1 query heads": [
        {"attention": (2, 1, 3, 0, 0), "mlp": (1, 1, 1, 1, 1), "vocab": (2, 2, 1, 1, 1)},
        {"attention": (6,), "mlp": (5,), "vocab": (7,)},
    ],
}
BATCHES = (3, 2)
BF16_TOLERANCE = 5e-3  # relative; a bfloat16 has 8 bits


def counts_of(name: str, *, split_heads: bool = False) -> dict[UnitKind, int]:
    """Units of a model at this file's block sizes."""
    return hf_counts(
        build(name).config,
        mlp_block=MLP_BLOCK,
        vocab_block=VOCAB_BLOCK,
        split_heads=split_heads,
    )


def plan_for(
    name: str, layouts: list[dict[str, tuple[int, ...]]], *, split_heads: bool = False
) -> Plan:
    """A plan with these shares; the shares of other counts are scaled to fit."""
    counts = counts_of(name, split_heads=split_heads)
    replicas, first = [], 0
    for index, shares in enumerate(layouts):
        degree = len(shares["mlp"])
        ranks = tuple(range(first, first + degree))
        first += degree
        layout = {
            kind: Layout.contiguous(
                scaled(shares["mlp" if kind is UnitKind.EXPERT else str(kind)], n)
            )
            for kind, n in counts.items()
        }
        replicas.append(ReplicaPlan(ranks=ranks, layouts=layout, batch=BATCHES[index]))
    return Plan.build(counts, replicas)


def scaled(shares: tuple[int, ...], total: int) -> tuple[int, ...]:
    """Shares in about the same proportion with another sum; zeros stay zero."""
    given = sum(shares)
    result = [s * total // given for s in shares]
    result[shares.index(max(shares))] += total - sum(result)
    return tuple(result)


@cache
def dense(name: str, sequences: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final parameters of the whole model in one process."""
    model = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, foreach=False)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        tokens = batch(step, 0, sequences, SEQ)
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses, norms, {n: p.detach() for n, p in model.named_parameters()}


def check(trained: list[Trained], plan: Plan, name: str) -> None:
    """Losses and norms are the dense ones; parameters close, and the same bits in all replicas."""
    losses, norms, params = dense(name, plan.global_batch)
    for told in trained:
        assert told.losses == pytest.approx(losses, rel=2e-6)
        assert told.norms == pytest.approx(norms, rel=2e-5)
    units = trained[0].units
    assert units is not None
    for step in range(STEPS):
        whole = assemble(plan, units, [t.params[step] for t in trained])
        for other in whole[1:]:
            assert all(torch.equal(whole[0][n], other[n]) for n in whole[0])
    assert set(whole[0]) == set(params)
    for n, p in params.items():
        torch.testing.assert_close(
            whole[0][n], p, rtol=0, atol=3e-4, msg=lambda m, n=n: f"{n}: {m}"
        )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_parallelize_model_trains_as_the_whole_one(
    rank_pool: RankPool, name: str, layout: str
) -> None:
    """Every model at every layout, shares of zero included, trains as the whole model does."""
    plan = plan_for(name, LAYOUTS[layout])
    trained = rank_pool.run(train_hf, len(plan.ranks), name=name, plan=plan, steps=STEPS, seq=SEQ)
    check(trained, plan, name)


@pytest.mark.parametrize("layout", SPLIT_LAYOUTS)
@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_parallelize_query_heads_of_one_kv_head_lie_on_several_ranks(
    rank_pool: RankPool, name: str, layout: str
) -> None:
    """More ranks than KV heads: a KV head is copied, counted once, and stays equal everywhere."""
    plan = plan_for(name, SPLIT_LAYOUTS[layout], split_heads=True)
    trained = rank_pool.run(
        train_hf, len(plan.ranks), name=name, plan=plan, steps=STEPS, seq=SEQ, split_heads=True
    )
    check(trained, plan, name)


@pytest.mark.parametrize("name", MODELS)
def test_parallelize_own_forward_gives_the_whole_logits(rank_pool: RankPool, name: str) -> None:
    """The model's own forward, with gathered outputs, equals the whole model's."""
    plan = plan_for(name, LAYOUTS["3"])
    with torch.no_grad():
        expected = build(name)(batch(1, 0, 2, 9)).logits
    for logits in rank_pool.run(logits_hf, 3, name=name, plan=plan):
        assert logits.shape[-1] == VOCAB
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "gpt2"])
def test_parallelize_bfloat16_with_masters_trains_like_float32(
    rank_pool: RankPool, name: str, layout: str
) -> None:
    """Ranks without vocab rows included: the loss is summed in float32 on all; one set of bits."""
    plan = plan_for(name, LAYOUTS[layout])
    asked = {"name": name, "plan": plan, "steps": STEPS, "seq": SEQ, "param_dtype": torch.bfloat16}
    trained: list[Trained] = rank_pool.run(train_hf, len(plan.ranks), timeout_s=30, **asked)
    losses, _, _ = dense(name, plan.global_batch)
    assert all(t.losses == trained[0].losses for t in trained)
    assert trained[0].losses == pytest.approx(losses, rel=BF16_TOLERANCE)
    units = trained[0].units
    assert units is not None
    for step in range(STEPS):
        local = [{n: p.float() for n, p in t.params[step].items()} for t in trained]
        whole = assemble(plan, units, local)
        assert all(torch.equal(whole[0][n], r[n]) for r in whole[1:] for n in r)


# Per step of two layers: the embedding; each sublayer's output, and its input's gradient; the
# head's input's gradient; two for the loss; one for the norm. Routing weights have a gradient too.
SUMS_PER_STEP = {"llama": 1 + 4 + 4 + 1 + 2 + 1, "gpt2": 13, "mixtral": 13 + 2}


@pytest.mark.parametrize("name", SUMS_PER_STEP)
def test_parallelize_modules_that_read_one_tensor_share_a_sum(
    rank_pool: RankPool, name: str
) -> None:
    """q, k and v cost one backward sum, not three; gate and up one, not two."""
    plan = plan_for(name, LAYOUTS["3"])
    few, many = (
        rank_pool.run(train_hf, 3, name=name, plan=plan, steps=steps, seq=SEQ) for steps in (1, 3)
    )
    for a, b in zip(few, many, strict=True):
        begun = [len(calls_of(t.calls, "collective_begin")) for t in (a, b)]
        assert begun[1] - begun[0] == 2 * SUMS_PER_STEP[name]
