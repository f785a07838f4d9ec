"""128 query heads on 30 and 28 ranks: how far the forward pass is from the whole model.

The paper's own case (arXiv 2504.06095), which NVIDIA's code cannot run. Ranks run in turn in one
process, with the project's layers on real shards; the oracle is the whole model in float64. Beside
it stands the same figure for 32 ranks of 4 heads each, which says how far rounding alone carries.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers

from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.planner import RankCost, min_max_shares
from ntp_core.runtime.modules.hf import hf_counts, parallelize_hf
from tests.support.turns import TurnsComm, in_turns

HEADS, EVEN_DEGREE = 128, 32
DEGREES = (30, 28)
KV_HEADS = (128, 8)  # each query head its own; 16 query heads to one, split over ranks
BATCHES = range(4)  # of random tokens


def figures() -> dict[str, dict[str, float]]:
    """degree -> relative distance of the logits, worst over KV heads, and that of 32 ranks."""
    found: dict[str, dict[str, float]] = {}
    even = {kv: _distance(kv, EVEN_DEGREE) for kv in KV_HEADS}
    for degree in DEGREES:
        ours = {kv: _distance(kv, degree) for kv in KV_HEADS}
        worst = max(KV_HEADS, key=lambda kv: ours[kv] / even[kv])
        found[f"heads128_on_{degree}"] = {"uneven": ours[worst], "even": even[worst]}
    return found


def _model(kv_heads: int) -> Any:
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=HEADS,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        head_dim=8,
        intermediate_size=192,
        max_position_embeddings=32,
        initializer_range=0.1,
        bos_token_id=0,
        eos_token_id=1,
    )
    config._attn_implementation = "eager"
    return transformers.LlamaForCausalLM(config).eval()


def _distance(kv_heads: int, degree: int) -> float:
    """Of the logits of a few batches from those of the whole model in float64, relative."""
    counts = hf_counts(_model(kv_heads).config, mlp_block=2, vocab_block=1, split_heads=True)
    layouts = {
        k: Layout.contiguous(min_max_shares(n, [RankCost(unit_s=1.0)] * degree))
        for k, n in counts.items()
    }
    plan = Plan.build(counts, [ReplicaPlan(ranks=tuple(range(degree)), layouts=layouts, batch=1)])

    @torch.no_grad()
    def body(comm: TurnsComm) -> torch.Tensor:
        parallel = parallelize_hf(_model(kv_heads), plan, comm, split_heads=True)
        return torch.cat([parallel.module(_tokens(seed)).logits for seed in BATCHES])

    ours = in_turns(degree, body)[0].double()
    with torch.no_grad():
        whole = _model(kv_heads).double()
        right = torch.cat([whole(_tokens(seed)).logits for seed in BATCHES])
    return float((ours - right).norm() / right.norm())


def _tokens(seed: int) -> torch.Tensor:
    return torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(seed))
