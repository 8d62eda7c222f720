"""A rank's part of the weights, read from files, is that part of the whole: of every family and format."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.core.sharding import Shard
from quire.formats.open_checkpoint import open_checkpoint
from quire.formats.presets import dummy_checkpoint
from quire.kernels.cpu.native_library import STORED_ENCODINGS
from quire.kernels.interface import QuantizedWeight
from quire.models.parameters import DecoderWeights, LayerWeights
from quire.weights.allocate import dummy_weights
from quire.weights.gguf_dequantize import GgufDequantizer
from quire.weights.load import unfilled_weights
from quire.weights.stored_weights import stored_weights
from tests.formats.tiny import FAMILY_NAMES, save_folder, tiny_model
from tests.kernels.cpu_kernels import needs_native
from tests.models.shards import cut
from tests.weights.loading import load
from tests.weights.test_stored_weights import mixed, values, written

RANKS = [Shard(0, 2), Shard(1, 2), Shard(3, 4), Shard.of(0, 1, 2), Shard.of(3, 2, 2)]


def assert_same(found: DecoderWeights, truth: DecoderWeights, atol: float = 0.0) -> None:
    pairs = [(found.embedding, truth.embedding), (found.head, truth.head), (found.final_norm, truth.final_norm)]
    for mine, theirs in zip(found.layers, truth.layers, strict=True):
        pairs += [(getattr(mine, name), getattr(theirs, name)) for name in LayerWeights.__slots__]
    for left, right in pairs:
        assert (left is None) == (right is None)
        if left is not None:
            torch.testing.assert_close(values(left), values(right), rtol=0, atol=atol)
    assert (found.head is found.embedding) == (truth.head is truth.embedding)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_folder(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(save_folder(tiny_model(family), tmp_path))
    whole = load(checkpoint, torch.bfloat16)  # stored in float32: the columns of a cut matrix are cast, too
    for shard in RANKS:
        part = unfilled_weights(checkpoint, torch.bfloat16, "cpu", None, None, shard).filled()
        assert_same(part, cut(whole, checkpoint.spec, shard))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_gguf_that_is_dequantized(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(written(tmp_path, family, "Q8_0"))
    whole = load(checkpoint, torch.float32)
    for shard in RANKS:
        part = unfilled_weights(checkpoint, torch.float32, "cpu", None, GgufDequantizer(), shard).filled()
        assert_same(part, cut(whole, checkpoint.spec, shard))


@needs_native
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_gguf_that_stays_as_stored(tmp_path: Path, family: str) -> None:
    checkpoint = open_checkpoint(written(tmp_path, family, "Q8_0"))
    whole = load(checkpoint, torch.float32)
    for shard in RANKS:
        part = stored_weights(checkpoint, GgufDequantizer(), STORED_ENCODINGS, None, shard)
        largest = max(layer.down.abs().max().item() for layer in whole.layers)
        assert_same(part, cut(whole, checkpoint.spec, shard), atol=2**-8 * largest)  # some are widened to bfloat16


@needs_native
def test_columns_are_cut_between_groups_and_widened_inside_one(tmp_path: Path) -> None:
    """256 columns: two halves of four groups of 32 each, and half a group of 256."""
    path, _ = mixed(tmp_path, {"ffn_down": "Q4_0", "attn_output": "Q4_K"})
    checkpoint = open_checkpoint(path)
    layer = stored_weights(checkpoint, GgufDequantizer(), STORED_ENCODINGS, None, Shard(1, 2)).layers[0]
    assert isinstance(layer.down, QuantizedWeight) and isinstance(layer.output, QuantizedWeight)
    assert [part.encoding for part in layer.down.parts] == ["Q4_0"]
    assert [part.encoding for part in layer.output.parts] == ["BF16"]
    whole = load(checkpoint, torch.float32).layers[0]
    torch.testing.assert_close(values(layer.down), _right(whole.down), rtol=0, atol=1e-4 * _largest(whole.down))
    torch.testing.assert_close(values(layer.output), _right(whole.output), rtol=2**-8, atol=0)


def _right(x: Tensor) -> Tensor:
    return x[:, x.shape[1] // 2 :]


def _largest(x: Tensor) -> float:
    return x.abs().max().item()


def test_a_rank_of_dummy_weights_has_its_part_of_the_values() -> None:
    spec = replace(dummy_checkpoint("qwen3-0.6b").spec, num_layers=1, hidden_size=64, ffn_size=96, vocab_size=999)
    whole = dummy_weights(spec, torch.float32, "cpu", 5).filled()
    for shard in (Shard(0, 2), Shard(1, 2)):
        assert_same(dummy_weights(spec, torch.float32, "cpu", 5, shard).filled(), cut(whole, spec, shard))
