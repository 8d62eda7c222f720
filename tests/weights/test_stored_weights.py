"""A GGUF file's matrices stay as stored until kernels pack them; then they are what the loader would have made."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from torch import Tensor

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.formats.open_checkpoint import open_checkpoint
from quire.kernels.cpu.native_library import STORED_ENCODINGS
from quire.kernels.interface import QuantizedWeight
from quire.models.decoder import Decoder
from quire.models.parameters import DecoderWeights, LayerWeights
from quire.weights.gguf_dequantize import GgufDequantizer
from quire.weights.stored_weights import stored_weights
from tests.formats.tiny import FAMILY_NAMES, gguf_metadata, gguf_tensors, tiny_model, write_gguf
from tests.kernels.cpu_kernels import native_kernels, needs_native
from tests.kernels.stored_rows import decoded, drawn_rows
from tests.models.running import in_chunks, run
from tests.weights.loading import load


def written(path: Path, family: str, kind: str, **changes: object) -> Path:
    model = tiny_model(family, **changes)
    arch = "llama" if family == "mistral" else family
    metadata, tensors = gguf_metadata(family, model.config), gguf_tensors(family, model)
    return write_gguf(path / "m.gguf", arch, metadata, tensors, GGMLQuantizationType[kind])


def stored(path: Path, readable: frozenset[str] = STORED_ENCODINGS) -> DecoderWeights:
    return stored_weights(open_checkpoint(path), GgufDequantizer(), readable)


def values(weight: Tensor | QuantizedWeight) -> Tensor:
    if isinstance(weight, Tensor):
        return weight
    kernels = native_kernels()
    return kernels.embed(torch.arange(weight.shape[0]), kernels.pack(weight))


def assert_same(found: DecoderWeights, truth: DecoderWeights, atol: float = 1e-6) -> None:
    pairs = [(found.embedding, truth.embedding), (found.head, truth.head), (found.final_norm, truth.final_norm)]
    for mine, theirs in zip(found.layers, truth.layers, strict=True):
        for name in LayerWeights.__slots__:
            left, right = getattr(mine, name), getattr(theirs, name)
            assert (left is None) == (right is None), name
            if left is not None:
                pairs.append((left, right))
    for left, right in pairs:
        assert tuple(left.shape) == tuple(right.shape)
        torch.testing.assert_close(values(left), right, atol=atol, rtol=0)


@needs_native
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_is_what_the_loader_makes_of_it(tmp_path: Path, family: str, kind: str) -> None:
    """Fused queries, keys and values, rows that llama.cpp interleaved, norms and biases, tied heads and others."""
    path = written(tmp_path, family, kind)
    found = stored(path)
    assert (found.head is found.embedding) == open_checkpoint(path).spec.tied_embeddings
    assert_same(found, load(open_checkpoint(path), torch.float32))


@needs_native
@pytest.mark.parametrize("tied", [True, False])
def test_heads_are_tied_or_a_matrix_of_their_own(tmp_path: Path, tied: bool) -> None:
    path = written(tmp_path, "qwen2", "Q4_1", tie_word_embeddings=tied)
    found = stored(path)
    assert (found.head is found.embedding) == tied
    assert_same(found, load(open_checkpoint(path), torch.float32))


def mixed(path: Path, kinds: dict[str, str], width: int = 256) -> tuple[Path, dict[str, np.ndarray]]:
    """A llama whose matrices have the encodings of the first pattern in their name, and their stored bytes."""
    model = tiny_model("llama", hidden_size=width, intermediate_size=width, head_dim=64)
    metadata, tensors = gguf_metadata("llama", model.config), gguf_tensors("llama", model)
    sizes = {"llama.embedding_length": width, "llama.feed_forward_length": width}
    sizes |= {"llama.attention.key_length": 64, "llama.attention.value_length": 64}
    writer, data = gguf.GGUFWriter(path / "mixed.gguf", "llama"), {}
    for key, value in (metadata | sizes).items():
        writer.add_float32(key, value) if isinstance(value, float) else writer.add_uint32(key, value)
    for index, (name, array) in enumerate(tensors.items()):
        kind = next((kinds[pattern] for pattern in kinds if pattern in name and array.ndim == 2), None)
        if kind is None:
            writer.add_tensor(name, np.ascontiguousarray(array, np.float32))
        else:
            data[name] = drawn_rows(kind, *array.shape, seed=index)
            writer.add_tensor(name, data[name], raw_dtype=GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path / "mixed.gguf", data


@needs_native
def test_parts_of_a_fused_matrix_keep_their_own_encodings(tmp_path: Path) -> None:
    """llama.cpp's mixtures store values wider than queries."""
    kinds = {"attn_q": "Q4_K", "attn_k": "Q5_K", "attn_v": "Q6_K", "ffn_gate": "Q4_0", "ffn_up": "IQ4_NL"}
    path, _ = mixed(tmp_path, kinds)
    found = stored(path)
    qkv = found.layers[0].qkv
    assert isinstance(qkv, QuantizedWeight)
    assert [part.encoding for part in qkv.parts] == ["Q4_K", "Q5_K", "Q6_K"]
    truth = load(open_checkpoint(path), torch.float32)
    largest = max(layer.qkv.abs().max().item() for layer in truth.layers)
    assert_same(found, truth, atol=1e-3 * largest)


@needs_native
@pytest.mark.parametrize("kind", ["Q2_K"])
def test_an_encoding_that_the_kernels_do_not_read_is_dequantized(tmp_path: Path, kind: str) -> None:
    assert kind not in STORED_ENCODINGS
    path, data = mixed(tmp_path, {"ffn_down": kind})
    down = stored(path).layers[0].down
    assert isinstance(down, QuantizedWeight)
    assert [part.encoding for part in down.parts] == ["BF16"]
    expected = decoded(kind, data["blk.0.ffn_down.weight"])
    assert torch.equal(values(down), expected.bfloat16().float())


def test_what_nothing_can_decode_is_refused_by_name(tmp_path: Path) -> None:
    class KnowsNoQ8(GgufDequantizer):
        def knows(self, encoding: str) -> bool:
            return encoding != "Q8_0"

    checkpoint = open_checkpoint(written(tmp_path, "qwen2", "Q8_0"))
    with pytest.raises(UnsupportedModel, match="Q8_0"):
        stored_weights(checkpoint, KnowsNoQ8(), STORED_ENCODINGS)


@needs_native
def test_a_file_that_was_cut_meanwhile_is_refused_with_its_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, "qwen2", "Q8_0")
    weights = stored(path)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(BrokenModelFile, match=r"changed while it was read: tensor \S+ lacks \d+ bytes of \d+"):
        for layer in weights.layers:
            values(layer.down)
    path.unlink()
    with pytest.raises(BrokenModelFile, match="cannot be read"):
        values(weights.embedding)


@needs_native
def test_progress_ends_at_all_bytes_when_everything_is_packed(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = open_checkpoint(written(tmp_path, "qwen2", "Q8_0"))
    weights = stored_weights(checkpoint, GgufDequantizer(), STORED_ENCODINGS, lambda *each: seen.append(each))
    Decoder(checkpoint.spec, weights, native_kernels(), 32)
    assert seen == sorted(seen)
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)


@needs_native
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_model_computes_from_its_file_as_from_the_tensors_of_the_loader(tmp_path: Path, family: str) -> None:
    """Logits of the stored weights and of the loader's tensors differ by the 16-bit activations alone."""
    checkpoint = open_checkpoint(written(tmp_path, family, "Q8_0"))
    prompts = [[3, 70, 12, 9, 5, 5, 31, 11, 40, 7], [1, 2, 3]]
    packed = Decoder(checkpoint.spec, stored(checkpoint.path), native_kernels(), 32)
    plain = Decoder(checkpoint.spec, load(checkpoint, torch.float32), native_kernels(), 32)
    found, truth = (torch.cat(run(each, prompts, in_chunks([10, 3], 4))) for each in (packed, plain))
    noise = (found - truth).abs().max() / truth.std()
    assert 0 < noise < 0.01
