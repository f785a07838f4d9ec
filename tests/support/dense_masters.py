"""The oracle of low-precision training: whole bf16 weights, fp32 masters, torch's own optimizer."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ntp_core.job import TrainConfig
from ntp_core.runtime.data import ByteText
from tests.support.dense_llama import DenseTrainer, Weights


class DenseMasters(DenseTrainer):
    """Trains masters by the gradients of their bf16 copies."""

    def __init__(self, config: TrainConfig, text: ByteText) -> None:
        super().__init__(config, text, torch.float32)
        self.masters: Weights = self.weights  # the optimizer's

    def train_step(self, global_batch: int) -> float:
        """One step; the loss is that of the copies, in float32."""
        copies = {n: m.detach().bfloat16().requires_grad_() for n, m in self.masters.items()}
        self.weights = copies
        self.step += 1
        tokens_BT = self.text.batch(self.step, 0, global_batch)
        loss = F.cross_entropy(self.logits(tokens_BT).float(), tokens_BT[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        for name, master in self.masters.items():
            grad = copies[name].grad
            assert grad is not None
            master.grad = grad.float()
        masters = list(self.masters.values())
        limit = self.config.clip_norm or float("inf")
        self.grad_norm = float(torch.nn.utils.clip_grad_norm_(masters, limit, foreach=False))
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.lr * min(self.step / self.config.warmup, 1.0)
        self.optimizer.step()
        return loss.item()
