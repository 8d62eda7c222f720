"""Dummy weights: the right shapes, the same every time, and no two rows alike."""

from dataclasses import replace

import pytest
import torch

from quire.core.errors import ConfigError
from quire.formats.presets import SHAPES
from quire.models.parameters import LayerWeights, layer_shapes
from quire.weights.allocate import dummy_weights, empty_weights, num_parameters

SMALL = replace(SHAPES["qwen3-0.6b"], num_layers=2, vocab_size=3000, ffn_size=256, hidden_size=128)


def tensors(layer: LayerWeights) -> dict[str, torch.Tensor]:
    named = {name: getattr(layer, name) for name in LayerWeights.__dataclass_fields__}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def test_named_shapes_have_their_published_sizes() -> None:
    published = {"llama-3.1-8b": 8.030, "llama-3.2-1b": 1.236, "qwen3-0.6b": 0.596, "qwen3-1.7b": 1.721}
    published |= {"qwen3-4b": 4.022, "qwen3-8b": 8.191, "qwen3-14b": 14.768, "smollm2-135m": 0.1345}
    assert set(published) == set(SHAPES)
    for name, billions in published.items():
        assert num_parameters(SHAPES[name]) / 1e9 == pytest.approx(billions, rel=0.001), name


def test_a_model_too_large_for_memory_is_refused_with_its_size() -> None:
    vast = replace(SMALL, vocab_size=2**31 - 1, hidden_size=2**24)
    with pytest.raises(ConfigError, match="GiB"):
        empty_weights(vast, torch.float32, "cpu")


@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_has_its_shape(tied: bool) -> None:
    spec = replace(SMALL, tied_embeddings=tied)
    weights = dummy_weights(spec, torch.bfloat16).filled()
    assert weights.embedding.shape == weights.head.shape == (3000, 128)
    assert (weights.head is weights.embedding) == tied
    for layer in weights.layers:
        assert {name: tuple(tensor.shape) for name, tensor in tensors(layer).items()} == layer_shapes(spec)
        assert torch.equal(layer.attention_norm, torch.ones(128)) and layer.attention_norm.dtype == torch.float32
        assert layer.qkv.dtype == torch.bfloat16


def test_the_seed_decides_and_nothing_else() -> None:
    first, again, other = (dummy_weights(SMALL, torch.float32, seed=seed).filled() for seed in (4, 4, 5))
    for one, two, three in zip(first.layers, again.layers, other.layers, strict=True):
        assert torch.equal(one.qkv, two.qkv) and torch.equal(one.down, two.down)
        assert not torch.equal(one.qkv, three.qkv)


def test_no_row_of_a_table_repeats_another() -> None:
    embedding = dummy_weights(replace(SMALL, vocab_size=20_000), torch.float32).filled().embedding
    assert len(torch.unique(embedding, dim=0)) == 20_000


def test_values_are_small_and_layers_differ() -> None:
    weights = dummy_weights(SMALL, torch.float32).filled()
    first, second = weights.layers
    assert not torch.equal(first.gate_up, second.gate_up)
    assert 0.015 < float(first.gate_up.std()) < 0.025 and abs(float(first.gate_up.mean())) < 0.002
