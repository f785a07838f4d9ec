"""The oracle of training: the same model, whole, in plain torch, with torch's own loss, optimizer
and clipping. It shares no code with the engine's layers, sync, clip or trainer. Of dropout it takes
the masks, which `tests/core/runtime/test_dropout.py` checks against plain integers.

Legend: B batch, T positions, D width, H query heads, E head dim, V vocab rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ntp_core.job import TrainConfig
from ntp_core.llama import LlamaConfig
from ntp_core.plan import Layout, Plan, ReplicaPlan
from ntp_core.runtime.activation.dropout import Draws, keep_mask
from ntp_core.runtime.comm import Comm
from ntp_core.runtime.data import ByteText
from ntp_core.runtime.layers import TensorParallelGroup
from ntp_core.runtime.model import Llama

Weights = dict[str, torch.Tensor]


def initial_weights(model: LlamaConfig, seed: int) -> Weights:
    """The engine's initial values of the whole model: those of a plan with one rank."""
    counts = model.units().counts
    layouts = {kind: Layout.contiguous((n,)) for kind, n in counts.items()}
    plan = Plan.build(counts, [ReplicaPlan(ranks=(0,), layouts=layouts, batch=1)])
    whole = Llama(model, TensorParallelGroup(Comm(0, 1), (0,)), plan, 0, seed)
    return {name: p.detach().clone() for name, p in whole.named_parameters()}


class DenseTrainer:
    """Trains the whole model in one process, one global batch a step."""

    def __init__(self, config: TrainConfig, text: ByteText, dtype: torch.dtype) -> None:
        self.config = config
        self.text = text
        initial = initial_weights(config.model, config.seed)
        self.weights = {n: w.to(dtype).requires_grad_() for n, w in initial.items()}
        self.grad_norm = 0.0
        matrices = [w for w in self.weights.values() if w.dim() == 2]
        vectors = [w for w in self.weights.values() if w.dim() == 1]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            foreach=False,
        )
        self.step = 0

    def train_step(self, global_batch: int) -> float:
        """One step on the step's global batch; the mean loss per token before it."""
        self.step += 1
        tokens_BT = self.text.batch(self.step, 0, global_batch)
        self.optimizer.zero_grad()
        loss = self.loss(tokens_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        weights = list(self.weights.values())
        limit = self.config.clip_norm or float("inf")
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(weights, limit, foreach=False))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * min(self.step / self.config.warmup, 1.0)
        self.optimizer.step()
        return loss.item()

    def loss(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Mean next-token cross-entropy of a [B, T + 1] batch."""
        return F.cross_entropy(self.logits(tokens_BT), tokens_BT[:, 1:].flatten())

    def logits(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        """Logits of the next token after each of a [B, T + 1] batch but the last, [B * T, V]."""
        model, w = self.config.model, self.weights
        last = 4 * model.layers
        x_BTD = self._drop(w["embed.weight"][tokens_BT[:, :-1]], last)
        for i in range(model.layers):
            layer = f"layers.{i}."
            h = _rms_norm(x_BTD, w[layer + "attn_norm.weight"], model.norm_eps)
            x_BTD = x_BTD + self._drop(self._attention(h, layer, 4 * i), 4 * i + 1)
            h = _rms_norm(x_BTD, w[layer + "mlp_norm.weight"], model.norm_eps)
            gate, up = h @ w[layer + "gate.weight"].T, h @ w[layer + "up.weight"].T
            columns = self._drop(gate * torch.sigmoid(gate) * up, 4 * i + 2)
            x_BTD = x_BTD + self._drop(columns @ w[layer + "down.weight"].T, 4 * i + 3)
        h = _rms_norm(x_BTD, w["norm.weight"], model.norm_eps)
        logits_BTV: torch.Tensor = h @ w["embed.weight"].T
        return logits_BTV.flatten(0, 1)

    def _drop(self, x_BTF: torch.Tensor, place: int) -> torch.Tensor:
        rate = self.config.model.dropout
        if not rate:
            return x_BTF
        draws = Draws(self.config.seed)
        draws.at(self.step, 0, len(x_BTF))
        keep = keep_mask(rate, draws, place, x_BTF.shape[1], torch.arange(x_BTF.shape[2]))
        return torch.where(keep, x_BTF / (1 - rate), 0.0)

    def _attention(self, h_BTD: torch.Tensor, layer: str, place: int) -> torch.Tensor:
        model, w = self.config.model, self.weights
        batch, seq, _ = h_BTD.shape
        heads_of = {"q": model.heads, "k": model.kv_heads, "v": model.kv_heads}
        q, k, v = (
            (h_BTD @ w[f"{layer}{n}.weight"].T).view(batch, seq, heads, -1).transpose(1, 2)
            for n, heads in heads_of.items()
        )
        groups = model.heads // model.kv_heads
        q, k = (_rotate(x, model.rope_base) for x in (q, k))
        k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
        scores_BHTT = q @ k.transpose(2, 3) / q.shape[-1] ** 0.5
        future = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        probs_BHTT = scores_BHTT.masked_fill(future, -torch.inf).softmax(-1)
        out_BTD = (probs_BHTT @ v).transpose(1, 2).reshape(batch, seq, -1)
        projected: torch.Tensor = self._drop(out_BTD, place) @ w[layer + "o.weight"].T
        return projected


def _rms_norm(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def _rotate(x_BHTE: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate the pair (i, i + E / 2) by position * base^(-2 i / E), as complex numbers."""
    half = x_BHTE.shape[-1] // 2
    angles = torch.arange(x_BHTE.shape[2], dtype=torch.float64)[:, None] * torch.pow(
        base, -torch.arange(half, dtype=torch.float64) / half
    )
    real = x_BHTE.dtype
    pairs = torch.complex(x_BHTE[..., :half].double(), x_BHTE[..., half:].double())
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1).to(real)
