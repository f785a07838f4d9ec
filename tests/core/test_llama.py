"""The little Llama in numbers."""

from __future__ import annotations

import pytest

from ntp_core.errors import ModelMismatch
from ntp_core.llama import LlamaConfig
from ntp_core.units import UnitKind


def test_units_count_heads_blocks_and_rows() -> None:
    """A unit is a KV head, a block of columns, a block of rows, the last one shorter."""
    model = LlamaConfig(vocab=250, width=48, heads=12, kv_heads=6, ffn=48, mlp_block=4)
    assert model.units().counts == {UnitKind.ATTENTION: 6, UnitKind.MLP: 12, UnitKind.VOCAB: 16}
    assert model.head_dim == 4


def test_units_tensors_have_the_elements_of_the_model() -> None:
    """Elements counted by hand: tied embedding, two layers, all norms."""
    model = LlamaConfig(vocab=250, width=48, heads=12, kv_heads=6, ffn=64, mlp_block=16)
    attention = 2 * 48 * 48 + 2 * 24 * 48
    expected = 250 * 48 + 48 + 2 * (attention + 3 * 64 * 48 + 2 * 48)
    assert expected == sum(t.numel for t in model.units().tensors)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kv_heads": 5}, "heads = 12 is not a multiple of 5"),
        ({"width": 50}, "width = 50 is not a multiple of 12"),
        ({"mlp_block": 7}, "ffn = 768 is not a multiple of 7"),
        ({"layers": 0}, "layers = 0"),
        ({"vocab_block": -1}, "vocab_block = -1"),
        ({"dropout": 1.0}, "dropout = 1.0"),
        ({"dropout": -0.1}, "dropout = -0.1"),
    ],
)
def test_config_sizes_that_do_not_fit_are_named(sizes: dict[str, float], message: str) -> None:
    """Both numbers stand in the message."""
    with pytest.raises(ModelMismatch, match=message):
        LlamaConfig(**sizes)  # type: ignore[arg-type]
