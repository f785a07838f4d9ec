"""Hugging Face causal language models out of their own configuration.

    counts = hf_counts(model.config)
    plan = ...                                   # any plan over these counts
    parallel = parallelize_hf(model, plan, comm)
    loss = hf_loss_sum(parallel)                 # for Engine.train_step

A model's own tensor-parallel plan says which style each module has; unit kinds come from names, and
what the plan leaves out (norms, routers, position embeddings) is held whole. GPT-2 ships no plan;
ours is here. transformers itself is not imported: a model brings all that is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ntp_core.errors import ModelMismatch
from ntp_core.plan import Plan
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.layers import copy_to_group, vocab_parallel_loss_sum
from ntp_core.runtime.modules.parallelize import OnPlan, ParallelModule, model_name, parallelize
from ntp_core.runtime.modules.wrap import Forward, is_conv1d
from ntp_core.styles import kind_by_name, parse_rules, rule_for
from ntp_core.units import UnitKind

GPT2_RULES = {
    "transformer.wte": "embedding_rowwise:vocab",
    "transformer.wpe": "replicated",
    "transformer.h.*.attn.c_attn": "packed_colwise:attention",
    "transformer.h.*.attn.c_proj": "rowwise:attention",
    "transformer.h.*.mlp.c_fc": "colwise:mlp",
    "transformer.h.*.mlp.c_proj": "rowwise:mlp",
    "lm_head": "colwise_gather_output:vocab",
}
QKV_PARTS = 3


def hf_counts(
    config: Any, *, mlp_block: int = 128, vocab_block: int = 64, split_heads: bool = False
) -> dict[UnitKind, int]:
    """Numbers of units of a model.

    Args:
        mlp_block, vocab_block: columns and rows in one unit.
        split_heads: units are query heads, whose KV head is copied to each rank that holds one of
            them; otherwise a unit is a KV head with all its query heads.
    """
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    counts = {
        UnitKind.ATTENTION: heads if split_heads else kv_heads,
        UnitKind.VOCAB: -(-int(config.vocab_size) // vocab_block),
    }
    columns = _columns(config)
    counts |= {kind: -(-size // mlp_block) for kind, size in columns.items()}
    return counts


def hf_rules(model: nn.Module, *, split_heads: bool = False) -> dict[str, str]:
    """The model's own plan in our words, its gaps filled with `replicated`.

    Raises:
        ModelMismatch: when the model brings no plan and we have none for it.
    """
    config: Any = model.config
    own: Mapping[str, str] = getattr(model, "_tp_plan", None) or {}
    if not own and config.model_type == "gpt2":
        own = GPT2_RULES
    if not own:
        raise ModelMismatch(
            f"a model of type '{config.model_type}' brings no tensor-parallel plan; "
            "give rules to parallelize() yourself"
        )
    rules = {pattern: _in_words(pattern, style) for pattern, style in own.items()}
    groups = _query_groups(config)
    if split_heads and groups > 1:
        for pattern, text in rules.items():
            if pattern.endswith(("k_proj", "v_proj")) and text.startswith("colwise"):
                rules[pattern] = f"colwise:{UnitKind.ATTENTION}:{groups}"
    parsed = parse_rules(rules)
    for name, param in model.named_parameters():
        if param.dim() > 1 and rule_for(name, parsed) is None:
            rules[name] = "replicated"
    return rules


def parallelize_hf(
    model: nn.Module, plan: Plan, comm: Comm, *, split_heads: bool = False
) -> ParallelModule:
    """Cut a causal language model in place for this rank. Every rank of the world takes part.

    Raises:
        ModelMismatch: for a model, plan or style that does not fit, the same on every rank.
    """

    def rules() -> dict[str, str]:
        found = hf_rules(model, split_heads=split_heads)
        _check_heads(model, plan, split_heads=split_heads)
        return found

    for module in model.modules():
        if is_conv1d(module) and getattr(module, "nf", 0) % QKV_PARTS == 0:
            module.packed_parts = QKV_PARTS  # type: ignore[assignment]
    on_plan: list[OnPlan] = [_without_fused_experts, _follow_split_size]
    if split_heads:
        on_plan.append(_follow_query_heads)
    return parallelize(model, plan, rules, comm, on_plan)


def hf_loss_sum(parallel: ParallelModule) -> Callable[[torch.Tensor], torch.Tensor]:
    """Sum of next-token cross-entropies over a [B, T + 1] batch, without gathering logits."""
    model: Any = parallel.module
    head: nn.Module = model.get_output_embeddings()
    base: nn.Module = model.base_model
    name = model_name(parallel, head)

    def loss_sum(tokens_BT: torch.Tensor) -> torch.Tensor:
        hidden_BTD = base(input_ids=tokens_BT[:, :-1], use_cache=False).last_hidden_state
        hidden_BTD = copy_to_group(hidden_BTD, parallel.group)
        # The loss is taken in float32, whatever the parameters are.
        logits_NV = F.linear(hidden_BTD.flatten(0, 1), cast(torch.Tensor, head.weight)).float()
        rows_N = parallel.rows(name)[tokens_BT[:, 1:]].flatten()
        return vocab_parallel_loss_sum(logits_NV, rows_N, parallel.group)

    return loss_sum


def _check_heads(model: nn.Module, plan: Plan, *, split_heads: bool) -> None:
    """Attention computes with whole heads: a unit must be made of them."""
    config: Any = model.config
    heads = int(config.num_attention_heads)
    kv_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    splits = split_heads and heads > kv_heads
    units = plan.counts.get(UnitKind.ATTENTION, 0)
    name = next(
        (n for n, m in model.named_modules() if hasattr(m, "q_proj") or hasattr(m, "c_attn")),
        "attention",
    )
    if heads % kv_heads:
        raise ModelMismatch(
            f"'{name}' has {heads} query heads over {kv_heads} KV heads, which do not divide them; "
            "change num_attention_heads or num_key_value_heads"
        )
    if splits and units != heads:
        raise ModelMismatch(
            f"the plan counts {units} attention units, '{name}' has {heads} query heads, and with "
            "split_heads each is a unit. Make the plan from hf_counts(config, split_heads=True)."
        )
    if not splits and (units < 1 or kv_heads % units):
        raise ModelMismatch(
            f"the plan counts {units} attention units, '{name}' has {kv_heads} KV heads, of which "
            "each unit must hold the same whole number, with their query heads. Make the plan from "
            "hf_counts(config), or cut single query heads with split_heads=True."
        )


def _in_words(pattern: str, style: str) -> str:
    if ":" in style or style.startswith("replicated") or style == "moe_tp_experts":
        return style
    kind = kind_by_name(pattern)
    return style if kind is None else f"{style}:{kind}"


def _query_groups(config: Any) -> int:
    heads = int(config.num_attention_heads)
    return heads // int(getattr(config, "num_key_value_heads", None) or heads)


def _columns(config: Any) -> dict[UnitKind, int]:
    """FFN columns by kind: of dense layers, and of each expert."""
    if config.model_type == "gpt2":
        return {UnitKind.MLP: int(config.n_inner or 4 * config.hidden_size)}
    experts = getattr(config, "moe_intermediate_size", None)
    if getattr(config, "num_local_experts", 0) or getattr(config, "num_experts", 0):
        return {UnitKind.EXPERT: int(experts or config.intermediate_size)}
    return {UnitKind.MLP: int(config.intermediate_size)}


def _without_fused_experts(parallel: ParallelModule) -> None:
    """Fused expert kernels do not take a rank that holds no column."""
    config: Any = parallel.module.config
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"


def _follow_split_size(parallel: ParallelModule) -> None:
    """GPT-2 splits q, k and v by a size that it remembers: it is the rank's own now."""
    for module in parallel.module.modules():
        attention: Any = module
        if hasattr(attention, "c_attn") and hasattr(attention, "split_size"):
            attention.split_size = attention.c_attn.weight.shape[1] // QKV_PARTS
            if "forward" not in attention.__dict__:
                attention.__dict__["forward"] = _without_heads(attention, attention.forward)


def _without_heads(attention: Any, forward: Forward) -> Forward:
    """GPT-2 cannot split nothing into three: a rank without heads adds nothing to the sum."""

    def guarded(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if attention.split_size:
            return forward(hidden_states, *args, **kwargs)
        nothing = attention.c_attn(hidden_states)
        return attention.resid_dropout(attention.c_proj(nothing)), None

    return guarded


def _follow_query_heads(parallel: ParallelModule) -> None:
    """With query heads as units, each local query head gets its own copy of its KV head."""
    if _query_groups(parallel.module.config) == 1:
        return
    for name, module in parallel.module.named_modules():
        attention: Any = module
        if not (hasattr(attention, "k_proj") and hasattr(attention, "num_key_value_groups")):
            continue
        attention.num_key_value_groups = 1
        q, k = (parallel.shard(f"{name}.{p}_proj.weight") for p in "qk")
        place = {block: i for i, block in enumerate(k.blocks)}
        heads = torch.tensor([place[u // k.spec.sharing] for u in q.blocks], dtype=torch.int64)
        for projection in (attention.k_proj, attention.v_proj):
            projection.kv_of_query = heads
            if not getattr(projection, "expands", False):
                projection.expands = True
                projection.register_forward_hook(_expand(int(attention.head_dim)))


def _expand(head_dim: int) -> Callable[[Any, Any, torch.Tensor], torch.Tensor]:
    def hook(module: Any, _inputs: Any, out: torch.Tensor) -> torch.Tensor:
        split = out.view(*out.shape[:-1], -1, head_dim)
        return split.index_select(-2, module.kv_of_query).flatten(-2)

    return hook
