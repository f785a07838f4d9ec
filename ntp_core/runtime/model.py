"""A Llama-like model over one replica's ranks: RMSNorm, rotary GQA, SwiGLU, tied embedding.

Dropout draws by logical unit (`activation.dropout`), so that it is the same at any layout. Its
places are numbered: four to a layer in the order in which they come, then the embedding.

Legend: B batch, T positions, D width, H query heads here, K KV heads here, E head dim, V vocab rows
here. Shares may be any, 0 included.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ntp_core.llama import LlamaConfig
from ntp_core.plan import Plan
from ntp_core.runtime.activation.dropout import Draws, UnitDropout
from ntp_core.runtime.activation.recompute import recomputed
from ntp_core.runtime.layers import (
    ColumnParallel,
    RowParallel,
    TensorParallelGroup,
    VocabParallelEmbedding,
    copy_to_group,
    vocab_parallel_loss_sum,
)
from ntp_core.runtime.shards import Shards, init_shard
from ntp_core.units import UnitKind

A, M, V = UnitKind.ATTENTION, UnitKind.MLP, UnitKind.VOCAB

DROPS_PER_LAYER = 4
Drop = Callable[[torch.Tensor], torch.Tensor]
Drops = tuple[Drop, Drop, Drop, Drop]


def keep_all(x: torch.Tensor) -> torch.Tensor:
    """No dropout."""
    return x


class LlamaLayer(nn.Module):
    """One decoder layer on this rank, with its own shares of heads and columns.

    Args:
        drops: of what the heads hand on, of attention's output, of FFN columns, of FFN's output.
    """

    def __init__(
        self,
        config: LlamaConfig,
        kv_heads: int,
        mlp_units: int,
        group: TensorParallelGroup,
        drops: Drops = (keep_all, keep_all, keep_all, keep_all),
    ) -> None:
        super().__init__()
        d, e = config.width, config.head_dim
        heads, columns = kv_heads * (config.heads // config.kv_heads), mlp_units * config.mlp_block
        self.config = config
        self.group = group
        self.drop_heads, self.drop_attn, self.drop_columns, self.drop_mlp = drops
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
        x_BTD = x_BTD + self.drop_attn(self.o(self.drop_heads(self._attend(h, rotary))))
        h = copy_to_group(self.mlp_norm(x_BTD), self.group)
        columns = self.drop_columns(F.silu(self.gate(h)) * self.up(h))
        return x_BTD + self.drop_mlp(self.down(columns))

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
        seed: of the initial weights and of dropout, the same on all ranks.
        is_new: leave the weights as they are: they will come from elsewhere.

    Attributes:
        recompute: keep only the layers' inputs for backward and run each layer again.
    """

    rotary_cos: torch.Tensor
    rotary_sin: torch.Tensor

    def __init__(
        self,
        config: LlamaConfig,
        group: TensorParallelGroup,
        plan: Plan,
        rank: int,
        seed: int,
        *,
        is_new: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.units = config.units()
        plan.check_model(self.units)
        self.group = group
        self.draws = Draws(seed)
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
                self._drops(i),
            )
            for i in range(config.layers)
        )
        self.drop_embed = self._drop(config.layers * DROPS_PER_LAYER)
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        self.recompute = False
        self.shards = Shards(self.units, plan, rank, dict(self.named_parameters()))
        for shard, param in self.shards:
            if not is_new:
                param.data = init_shard(shard, seed, config.init_std)

    def loss_sum(self, tokens_BT: torch.Tensor, *, step: int = 0, first: int = 0) -> torch.Tensor:
        """Sum of next-token cross-entropies over a [B, T + 1] batch, float64 scalar.

        Args:
            step, first: the job's step, and the number of the first sequence in its global batch:
                by them dropout draws. Backward comes before the next call.
        """
        self.draws.at(step, first, len(tokens_BT))
        inputs, targets = tokens_BT[:, :-1], tokens_BT[:, 1:]
        x_BTD = self.drop_embed(self.embed(inputs))
        rotary = rotary_tables(inputs.shape[1], self.config)
        for layer in self.layers:
            x_BTD = recomputed(layer, x_BTD, rotary) if self.recompute else layer(x_BTD, rotary)
        h_BTD = copy_to_group(self.norm(x_BTD), self.group)
        # The loss is taken in float32, whatever the parameters are.
        logits_NV = F.linear(h_BTD.flatten(0, 1), self.embed.weight).float()
        rows_N = self.embed.row_of_token[targets].flatten()
        return vocab_parallel_loss_sum(logits_NV, rows_N, self.group)

    def adopt(self, plan: Plan, tensors: list[torch.Tensor]) -> None:
        """Take the local tensors of a new plan, and the group of this rank's replica in it."""
        rank = self.shards.rank
        self.shards.adopt(plan, tensors)
        self.group.ranks = plan.replicas[plan.place(rank)[0]].ranks
        self.embed.row_of_token = row_of_token(self.config, plan, rank)

    def _drops(self, layer: int) -> Drops:
        place, name = layer * DROPS_PER_LAYER, f"layers.{layer}."
        return (
            self._drop(place, name + "o.weight"),
            self._drop(place + 1),
            self._drop(place + 2, name + "down.weight"),
            self._drop(place + 3),
        )

    def _drop(self, place: int, reader: str | None = None) -> UnitDropout:
        """Dropout of what the cut columns of `reader` read; without one, of the model's width."""

        def features() -> torch.Tensor:
            if reader is None:
                return torch.arange(self.config.width)
            return next(s for s in self.shards.shards if s.spec.name == reader).logical_index()

        return UnitDropout(self.config.dropout, self.draws, place, features)


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
    cos, sin = (t.to(x_BHTE.dtype) for t in rotary)
    a, b = x_BHTE.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
