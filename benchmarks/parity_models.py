"""Small Hugging Face models for the parity benchmark: real architectures, random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 256
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "intermediate_size": 256,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_COMMON, "tie_word_embeddings": True}),
    "qwen": ("Qwen3Config", "Qwen3ForCausalLM", {**_COMMON, "attention_bias": True}),
    "moe": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": VOCAB,
            "n_embd": 128,
            "n_head": 16,
            "n_positions": 64,
            "n_inner": 256,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "attn_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "resid_pdrop": 0.0,
        },
    ),
}


def build(name: str, layers: int = 2) -> nn.Module:
    """The model of that name, the same weights every time."""
    config_class, model_class, options = MODELS[name]
    options = options | {"n_layer" if name == "gpt2" else "num_hidden_layers": layers}
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options)
    config._attn_implementation = "eager"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    model: nn.Module = getattr(transformers, model_class)(config)
    return model.train()


def batch(step: int, first: int, count: int, seq: int) -> torch.Tensor:
    """Sequences of a step's global batch by logical number, int64 [count, seq + 1]."""
    rows = []
    for i in range(first, first + count):
        generator = torch.Generator().manual_seed(100_003 * step + i)
        rows.append(torch.randint(0, VOCAB, (seq + 1,), generator=generator))
    return torch.stack(rows)
