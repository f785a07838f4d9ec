"""Shape of the Llama-like model in numbers: units, tensors and work, without any tensor library."""

from __future__ import annotations

from dataclasses import dataclass

from ntp_core.cost import Work, WorkShape, work_of_model
from ntp_core.errors import ModelMismatch
from ntp_core.inbound.ranges import check_number, check_whole
from ntp_core.units import ModelUnits, TensorSpec, UnitKind

A, M, V = UnitKind.ATTENTION, UnitKind.MLP, UnitKind.VOCAB

MAX_SIZE = 1 << 24
"""Largest width, vocab and the like: beyond any model, and still a list that fits memory."""
MAX_LAYERS = 4096

_SIZES = ("vocab", "width", "heads", "kv_heads", "ffn", "mlp_block", "vocab_block")


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Shape of the model.

    Attributes:
        mlp_block: FFN columns in one unit; must divide `ffn`.
        vocab_block: vocab rows in one unit.
        init_std: deviation of the initial weights.
        dropout: probability with which an element is set to 0 while training: of the embedding, of
            what heads and FFN columns hand on, and of what attention and FFN add to the sum.
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
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in _SIZES:
            check_whole(name, getattr(self, name), 1, MAX_SIZE, ModelMismatch)
        check_whole("layers", self.layers, 1, MAX_LAYERS, ModelMismatch)
        check_number("rope_base", self.rope_base, 0, 1e12, above=True, refusal=ModelMismatch)
        check_number("norm_eps", self.norm_eps, 0, 1, above=True, refusal=ModelMismatch)
        check_number("init_std", self.init_std, 0, 1e3, refusal=ModelMismatch)
        check_number("dropout", self.dropout, 0, 1, below=True, refusal=ModelMismatch)
        pairs = {
            "heads": (self.heads, self.kv_heads),
            "width": (self.width, self.heads),
            "ffn": (self.ffn, self.mlp_block),
        }
        for name, (whole, part) in pairs.items():
            if whole % part:
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
