"""Small Hugging Face models with random weights, made from a configuration only."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 100
WIDTH = 48

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": WIDTH,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 64,
    "n_inner": 72,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "attn_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "resid_pdrop": 0.0,
}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _COMMON),
    "llama_tied": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**_COMMON, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    ),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", _COMMON),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**_COMMON, "attention_bias": True}),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT2),
}


def build(name: str, seed: int = 0) -> nn.Module:
    """The model of that name, the same weights for the same seed; biases and gains are not trivial.

    A zero bias or a gain of one would hide that it is cut or summed wrongly.
    """
    config_class, model_class, options = MODELS[name]
    transformers.logging.set_verbosity_error()
    torch.manual_seed(seed)
    config = getattr(transformers, config_class)(**options)
    config._attn_implementation = "eager"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"
    model: nn.Module = getattr(transformers, model_class)(config)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 1:
                param.add_(torch.randn(param.shape, generator=generator) * 0.1)
    return model.train()


def batch(step: int, first: int, count: int, seq: int) -> torch.Tensor:
    """Sequences of a step's global batch by logical number, int64 [count, seq + 1]."""
    rows = [
        torch.randint(
            0, VOCAB, (seq + 1,), generator=torch.Generator().manual_seed(1000 * step + first + i)
        )
        for i in range(count)
    ]
    return torch.stack(rows)
