"""A Llama-like model over one replica's ranks: RMSNorm, rotary GQA, SwiGLU, tied embedding.

Legend: B batch, T positions, D width, H query heads here, K KV heads here, E head dim, V vocab rows
here. Shares may be any, 0 included.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from ntp_core.cost import Work, WorkShape, work_of_model
from ntp_core.errors import ModelMismatch
from ntp_core.plan import Plan
from ntp_core.runtime.layers import (
    ColumnParallel,
    RowParallel,
    TensorParallelGroup,
    VocabParallelEmbedding,
    copy_to_group,
    vocab_parallel_loss_sum,
)
from ntp_core.runtime.shards import Shards, init_shard
from ntp_core.units import ModelUnits, TensorSpec, UnitKind

A, M, V = UnitKind.ATTENTION, UnitKind.MLP, UnitKind.VOCAB


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of the model.

    Attributes:
        mlp_block: FFN columns in one unit; must divide `ffn`.
        vocab_block: vocab rows in one unit.
        init_std: deviation of the initial weights.
    """

    vocab: int = 256
    layers: int = 2
    width: int = 192
    heads: int = 12
    kv_heads: int = 6
    ffn: int = 768
    mlp_block: int = 16
    vocab_block: int = 16
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def __post_init__(self) -> None:
        pairs = {
            "heads": (self.heads, self.kv_heads),
            "width": (self.width, self.heads),
            "ffn": (self.ffn, self.mlp_block),
        }
        for name, (whole, part) in pairs.items():
            if part < 1 or whole % part:
                raise ModelMismatch(f"{name} = {whole} is not a multiple of {part}; change either")

    @property
    def head_dim(self) -> int:
        """Elements per head."""
        return self.width // self.heads

    def units(self) -> ModelUnits:
        """Units and tensors of the whole model."""
        d, e = self.width, self.head_dim
        tensors = [
            TensorSpec(name="embed.weight", shape=(self.vocab, d), kind=V),
            TensorSpec(name="norm.weight", shape=(d,)),
        ]
        for i in range(self.layers):
            p = f"layers.{i}."
            tensors += [
                TensorSpec(name=p + "attn_norm.weight", shape=(d,), layer=i),
                TensorSpec(name=p + "q.weight", shape=(self.heads * e, d), kind=A, layer=i),
                TensorSpec(name=p + "k.weight", shape=(self.kv_heads * e, d), kind=A, layer=i),
                TensorSpec(name=p + "v.weight", shape=(self.kv_heads * e, d), kind=A, layer=i),
                TensorSpec(name=p + "o.weight", shape=(d, self.heads * e), kind=A, layer=i, dim=1),
                TensorSpec(name=p + "mlp_norm.weight", shape=(d,), layer=i),
                TensorSpec(name=p + "gate.weight", shape=(self.ffn, d), kind=M, layer=i),
                TensorSpec(name=p + "up.weight", shape=(self.ffn, d), kind=M, layer=i),
                TensorSpec(name=p + "down.weight", shape=(d, self.ffn), kind=M, layer=i, dim=1),
            ]
        counts = {
            A: self.kv_heads,
            M: self.ffn // self.mlp_block,
            V: -(-self.vocab // self.vocab_block),
        }
        return ModelUnits(counts=counts, tensors=tuple(tensors))

    def work(self, seq: int) -> Work:
        """Work per token position, for sequences of `seq` tokens."""
        scores = 6 * seq * self.head_dim * (self.heads // self.kv_heads) * self.layers
        return work_of_model(self.units(), WorkShape(seq=seq, extra_per_unit={A: scores}))


class LlamaLayer(nn.Module):
    """One decoder layer on this rank, with its own shares of heads and columns."""

    def __init__(
        self, config: LlamaConfig, kv_heads: int, mlp_units: int, group: TensorParallelGroup
    ) -> None:
        super().__init__()
        d, e = config.width, config.head_dim
        heads, columns = kv_heads * (config.heads // config.kv_heads), mlp_units * config.mlp_block
        self.config = config
        self.group = group
        self.attn_norm = nn.RMSNorm(d, config.norm_eps)
        self.q = ColumnParallel(heads * e, d)
        self.k = ColumnParallel(kv_heads * e, d)
        self.v = ColumnParallel(kv_heads * e, d)
        self.o = RowParallel(d, heads * e, group)
        self.mlp_norm = nn.RMSNorm(d, config.norm_eps)
        self.gate = ColumnParallel(columns, d)
        self.up = ColumnParallel(columns, d)
        self.down = RowParallel(d, columns, group)

    def forward(
        self, x_BTD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[B, T, D] -> [B, T, D]."""
        h = copy_to_group(self.attn_norm(x_BTD), self.group)
        x_BTD = x_BTD + self.o(self._attend(h, rotary))
        h = copy_to_group(self.mlp_norm(x_BTD), self.group)
        out: torch.Tensor = x_BTD + self.down(F.silu(self.gate(h)) * self.up(h))
        return out

    def _attend(
        self, h_BTD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        q: torch.Tensor = self.q(h_BTD)
        k, v = self.k(h_BTD), self.v(h_BTD)
        if q.shape[-1] == 0:  # no heads here: an empty contribution, still part of the graph
            return q
        e = self.config.head_dim
        batch, seq, _ = q.shape
        q_BHTE = rotate(q.view(batch, seq, -1, e).transpose(1, 2), rotary)
        k_BKTE = rotate(k.view(batch, seq, -1, e).transpose(1, 2), rotary)
        v_BKTE = v.view(batch, seq, -1, e).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=True
        )
        return out.transpose(1, 2).flatten(2)


class Llama(nn.Module):
    """The part of the model that one rank of a plan holds.

    Args:
        comm: only its groups are used.
        plan, rank: which units this rank holds; the rank must have a place.
        seed: of the initial weights, the same on all ranks.
    """

    rotary_cos: torch.Tensor
    rotary_sin: torch.Tensor

    def __init__(
        self, config: LlamaConfig, group: TensorParallelGroup, plan: Plan, rank: int, seed: int
    ) -> None:
        super().__init__()
        self.config = config
        self.units = config.units()
        plan.check_model(self.units)
        self.group = group
        replica, tp_rank = plan.place(rank)
        layouts = plan.replicas[replica]
        rows = row_of_token(config, plan, rank)
        self.embed = VocabParallelEmbedding(rows, int((rows >= 0).sum()), config.width, group)
        self.layers = nn.ModuleList(
            LlamaLayer(
                config,
                layouts.layout(A, i).shares[tp_rank],
                layouts.layout(M, i).shares[tp_rank],
                group,
            )
            for i in range(config.layers)
        )
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.shards = Shards(self.units, plan, rank, dict(self.named_parameters()))
        for shard, param in self.shards:
            param.data = init_shard(shard, seed, config.init_std)

    def loss_sum(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Sum of next-token cross-entropies over a [B, T + 1] batch, float64 scalar."""
        inputs, targets = tokens_BT[:, :-1], tokens_BT[:, 1:]
        x_BTD = self.embed(inputs)
        rotary = rotary_tables(inputs.shape[1], self.config)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotary)
        h_BTD = copy_to_group(self.norm(x_BTD), self.group)
        logits_NV = F.linear(h_BTD.flatten(0, 1), self.embed.weight)
        rows_N = self.embed.row_of_token[targets].flatten()
        return vocab_parallel_loss_sum(logits_NV, rows_N, self.group)

    def adopt(self, plan: Plan, tensors: list[torch.Tensor]) -> None:
        """Take the local tensors of a new plan. Same rank, same replica."""
        rank = self.shards.rank
        self.shards.adopt(plan, tensors)
        self.embed.row_of_token = row_of_token(self.config, plan, rank)


def row_of_token(config: LlamaConfig, plan: Plan, rank: int) -> torch.Tensor:
    """token -> row of this rank's embedding, -1 where another rank holds it. int64 [vocab]."""
    replica, tp_rank = plan.place(rank)
    rows = torch.full((config.vocab,), -1, dtype=torch.int64)
    held = [
        torch.arange(u * config.vocab_block, min((u + 1) * config.vocab_block, config.vocab))
        for u in plan.replicas[replica].layout(V).units(tp_rank)
    ]
    if held:
        tokens = torch.cat(held)
        rows[tokens] = torch.arange(len(tokens))
    return rows


def rotary_tables(seq: int, config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, [T, E / 2] (arXiv 2104.09864)."""
    e = config.head_dim
    freq = config.rope_base ** (-torch.arange(0, e, 2, dtype=torch.float32) / e)
    angle = torch.arange(seq, dtype=torch.float32)[:, None] * freq[None, :]
    return angle.cos(), angle.sin()


def rotate(x_BHTE: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Rotate pairs (i, i + E / 2) by position."""
    cos, sin = rotary
    a, b = x_BHTE.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
