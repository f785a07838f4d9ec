"""AdamW over shards: torch's own bits, whatever is kept where."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from ntp_core.errors import InvalidInput
from ntp_core.job import even_plan
from ntp_core.llama import LlamaConfig
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.optim.adamw import (
    PlaneAdamW,
    StateOptions,
    cast_errors,
    pick,
    put,
    state_bytes,
)
from ntp_core.runtime.optim.planes import planes_of
from ntp_core.runtime.shards import (
    KeptPlacement,
    Placement,
    Shard,
    Shards,
    grad_dtype,
    set_grad_dtype,
    shards_of,
)
from ntp_core.units import ModelUnits
from tests.support.random_plans import random_model, random_plan

MODEL = LlamaConfig(vocab=13, layers=1, width=8, heads=2, kv_heads=1, ffn=8, mlp_block=2)
BF16 = StateOptions(param_dtype=torch.bfloat16)


def whole(model: ModelUnits, seed: int) -> Shards:
    """All tensors on one rank, with random values."""
    generator = torch.Generator().manual_seed(seed)
    layouts = {k: Layout.contiguous((n,)) for k, n in model.counts.items()}
    plan = Plan.build(model.counts, [ReplicaPlan(ranks=(0,), layouts=layouts, batch=1)])
    params = {
        t.name: nn.Parameter(torch.randn(t.shape, generator=generator)) for t in model.tensors
    }
    return Shards(model, plan, 0, params)


def test_adamw_with_masters_has_the_bits_of_torch_on_the_masters() -> None:
    """Fed with the same gradients, torch's fused AdamW on fp32 copies takes the same steps."""
    shards = whole(MODEL.units(), 1)
    oracle = [nn.Parameter(p.detach().clone()) for p in shards.params]
    settings = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1}
    theirs = torch.optim.AdamW(oracle, fused=True, **settings)  # type: ignore[arg-type]
    ours = PlaneAdamW([{"params": shards.params}], shards, Comm(0, 1), BF16, **settings)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(2)
    for _ in range(5):
        for mine, their in zip(shards.params, oracle, strict=True):
            grad = torch.randn(mine.shape, generator=generator)
            mine.grad, their.grad = grad.clone(), grad.clone()
        ours.step()
        theirs.step()
        for mine, their in zip(shards.params, oracle, strict=True):
            assert torch.equal(their.data, ours.state[mine]["master"])
            assert torch.equal(their.data.bfloat16(), mine.data)
            for name in ("exp_avg", "exp_avg_sq", "step"):
                assert torch.equal(theirs.state[their][name], ours.state[mine][name])
    assert cast_errors(ours) == {}


def test_masters_start_as_the_parameters_were_before_the_cast() -> None:
    """Nothing of the initial values is lost, and parameters are cast to nearest even."""
    shards = whole(MODEL.units(), 3)
    before = [p.detach().clone() for p in shards.params]
    ours = PlaneAdamW([{"params": shards.params}], shards, Comm(0, 1), BF16, lr=0.1)
    for param, old in zip(shards.params, before, strict=True):
        assert torch.equal(old, ours.state[param]["master"])
        assert torch.equal(old.bfloat16(), param.data)
        assert grad_dtype(param) == torch.float32
    assert state_bytes(ours) == 12 * sum(p.numel() for p in before)
    names = [p.name for p in planes_of(shards, ours)]
    assert names == ["param", "master", "exp_avg", "exp_avg_sq"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_summed_in_the_type_asked_for(dtype: torch.dtype) -> None:
    """256 + 1 in bfloat16 is 256; in float32 it is not."""
    shards = whole(MODEL.units(), 4)
    options = StateOptions(param_dtype=torch.bfloat16, grad_dtype=dtype)
    PlaneAdamW([{"params": shards.params}], shards, Comm(0, 1), options, lr=0.1)
    param = shards.params[0]
    for factor in (256.0, 1.0):
        (param * factor).sum().backward()
    assert param.grad is not None
    assert param.grad.dtype == dtype
    assert float(param.grad.view(-1)[0]) == (257.0 if dtype == torch.float32 else 256.0)


@pytest.mark.parametrize("seed", range(15))
def test_kept_parts_of_all_ranks_are_the_whole(seed: int) -> None:
    """What ranks keep, put together, is every replica's tensor; each element once."""
    draw = random.Random(seed)
    model = random_model(draw)
    plan = random_plan(draw, model)
    rebuilt = [torch.zeros(t.shape) for t in model.tensors]
    for rank in plan.ranks:
        kept = KeptPlacement(model, plan, rank).counted()
        for i, shard in enumerate(shards_of(model, plan, rank)):
            part = Shard(i, shard.spec, shard.num_units, kept[i])
            local = shard.logical_index().float() + 1
            shape = [1] * len(shard.shape)
            shape[shard.spec.dim] = -1
            values = local.view(shape).expand(shard.shape).contiguous()
            mine = pick(shard, part, values)
            rebuilt[i].index_add_(shard.spec.dim, part.logical_index(), mine)
            again = torch.zeros(shard.shape)
            put(shard, part, again, mine)
            assert float(again.sum()) == float(mine.sum())
    for t, total in zip(model.tensors, rebuilt, strict=True):
        lines = total.movedim(t.dim, 0).reshape(t.shape[t.dim], -1)
        expected = torch.arange(1.0, t.shape[t.dim] + 1)[:, None].expand(lines.shape)
        assert torch.equal(expected, lines), t.name


def test_kept_placement_with_one_replica_is_what_the_rank_holds() -> None:
    """There is nothing to deal out."""
    plan = even_plan(MODEL, (2,), 2)
    for rank in (0, 1):
        kept, plain = (c(MODEL.units(), plan, rank) for c in (KeptPlacement, Placement))
        assert not kept.is_dealt  # type: ignore[attr-defined]
        assert [s.blocks for s in plain.shards] == [s.blocks for s in kept.shards]
        assert plain.counted() == kept.counted()
        assert plain.held == kept.held


def test_gradient_type_that_torch_cannot_keep_is_named() -> None:
    """A parameter without grad_dtype (an older torch) is refused with what to do."""

    class Old:
        dtype = torch.bfloat16

    with pytest.raises(InvalidInput, match="use a torch that has"):
        set_grad_dtype(Old(), torch.float32)  # type: ignore[arg-type]
