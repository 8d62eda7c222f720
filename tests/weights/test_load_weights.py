"""What the loader fills equals the state dict of transformers, fused and converted by hand here."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire.core.errors import BrokenModelFile, UnsupportedModel
from quire.formats.checkpoint import StoredTensor
from quire.formats.open_checkpoint import open_checkpoint
from quire.models.parameters import DecoderWeights, LayerWeights, layer_shapes
from quire.weights.gguf_dequantize import GgufDequantizer
from quire.weights.load import unfilled_weights
from quire.weights.loader_threads import load_slices
from quire.weights.tensor_reader import slices_of
from tests.formats.tiny import FAMILY_NAMES, gguf_metadata, gguf_tensors, save_folder, tiny_model, write_gguf
from tests.weights.loading import load

State = dict[str, Tensor]
QUANTIZED = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")


def fused_layer(state: State, layer: int, family: str) -> dict[str, Tensor]:
    own = {
        name.removeprefix(f"model.layers.{layer}."): value
        for name, value in state.items()
        if name.startswith(f"model.layers.{layer}.")
    }
    norm_offset = 1.0 if family.startswith("gemma") else 0.0
    expected: dict[str, Tensor] = {}
    for kind, suffix in (("weight", ""), ("bias", "_bias")):
        if f"self_attn.q_proj.{kind}" in own:
            parts = [own[f"self_attn.{letter}_proj.{kind}"] for letter in "qkv"]
            expected[f"qkv{suffix}"] = torch.cat(parts)
        if f"mlp.gate_proj.{kind}" in own:
            expected[f"gate_up{suffix}"] = torch.cat([own[f"mlp.gate_proj.{kind}"], own[f"mlp.up_proj.{kind}"]])
        for stored, field in (
            ("self_attn.qkv_proj", "qkv"),
            ("mlp.gate_up_proj", "gate_up"),
            ("self_attn.o_proj", "output"),
            ("mlp.down_proj", "down"),
        ):
            if f"{stored}.{kind}" in own:
                expected[f"{field}{suffix}"] = own[f"{stored}.{kind}"]
    norms = {
        "input_layernorm": "attention_norm",
        "self_attn.q_norm": "query_norm",
        "self_attn.k_norm": "key_norm",
    }
    if family.startswith("gemma"):
        norms |= {
            "post_attention_layernorm": "attention_post_norm",
            "pre_feedforward_layernorm": "mlp_norm",
            "post_feedforward_layernorm": "mlp_post_norm",
        }
    else:
        norms["post_attention_layernorm"] = "mlp_norm"
    for stored, field in norms.items():
        if f"{stored}.weight" in own:
            expected[field] = own[f"{stored}.weight"] + norm_offset
    return expected


def fields_of(layer: LayerWeights) -> dict[str, Tensor]:
    named = {name: getattr(layer, name) for name in LayerWeights.__dataclass_fields__}
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def assert_same(weights: DecoderWeights, state: State, family: str, tied: bool) -> None:
    offset = 1.0 if family.startswith("gemma") else 0.0
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"])
    assert torch.equal(weights.final_norm, state["model.norm.weight"] + offset)
    assert torch.equal(weights.head, state["lm_head.weight"])
    assert (weights.head is weights.embedding) == tied
    for index, layer in enumerate(weights.layers):
        expected, found = fused_layer(state, index, family), fields_of(layer)
        assert set(found) == set(expected)
        for name, tensor in found.items():
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6, msg=f"{index} {name}")


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_folder_gives_the_state_dict(tmp_path: Path, family: str, tied: bool) -> None:
    model = tiny_model(family, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(save_folder(model, tmp_path, shard_size="70KB"))
    assert checkpoint.spec.tied_embeddings == tied
    weights = load(checkpoint, torch.float32)
    assert_same(weights, model.state_dict(), family, tied)
    assert {name: tuple(t.shape) for name, t in fields_of(weights.layers[0]).items()} == layer_shapes(checkpoint.spec)


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_gguf_gives_the_state_dict(tmp_path: Path, family: str) -> None:
    model = tiny_model(family)
    arch = "llama" if family == "mistral" else family
    path = write_gguf(tmp_path / "m.gguf", arch, gguf_metadata(family, model.config), gguf_tensors(family, model))
    weights = load(open_checkpoint(path), torch.float32)
    assert_same(weights, model.state_dict(), family, model.config.tie_word_embeddings)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_matrices_equal_gguf_dequantization(tmp_path: Path, kind: str) -> None:
    model = tiny_model("qwen2")
    tensors = gguf_tensors("qwen2", model)
    quantization = GGMLQuantizationType[kind]
    path = write_gguf(tmp_path / "m.gguf", "qwen2", gguf_metadata("qwen2", model.config), tensors, quantization)
    weights = load(open_checkpoint(path), torch.float32)

    def through(name: str) -> np.ndarray:
        return gguf.quants.dequantize(gguf.quants.quantize(tensors[name], quantization), quantization)

    for layer, found in enumerate(weights.layers):
        queries = np.concatenate([through(f"blk.{layer}.attn_{letter}.weight") for letter in "qkv"])
        np.testing.assert_array_equal(found.qkv.numpy(), queries)
        np.testing.assert_array_equal(found.down.numpy(), through(f"blk.{layer}.ffn_down.weight"))
    np.testing.assert_array_equal(weights.embedding.numpy(), through("token_embd.weight"))


def every_decodable_type() -> list[str]:
    names = []
    for kind in GGMLQuantizationType:
        block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        try:
            gguf.quants.dequantize(block, kind)
        except NotImplementedError:
            continue
        names.append(kind.name)
    return names


@pytest.mark.parametrize("kind", every_decodable_type())
def test_every_type_that_gguf_decodes_is_decoded_across_slices(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.weights.tensor_reader.SLICE_VALUES", 5 * 512)
    quantization = GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    packed = np.random.default_rng(3).integers(0, 60, (33, 512 // block * block_bytes), dtype=np.uint8)
    path = tmp_path / "packed"
    path.write_bytes(b"before" + packed.tobytes() + b"after")
    stored = StoredTensor("packed", (33, 512), kind, path, len(b"before"), packed.nbytes)
    values = torch.full((33, 512), -1.0)
    load_slices(slices_of(stored, values), GgufDequantizer(), torch.device("cpu"), lambda num_bytes: None)
    expected = gguf.quants.dequantize(packed, quantization).reshape(33, 512)
    np.testing.assert_array_equal(values.numpy(), expected)


def test_matrices_take_the_dtype_and_norms_stay_float32(tmp_path: Path) -> None:
    model = tiny_model("gemma3").to(torch.bfloat16)
    weights = load(open_checkpoint(save_folder(model, tmp_path)), torch.bfloat16)
    state = model.state_dict()
    assert weights.embedding.dtype == weights.layers[0].qkv.dtype == torch.bfloat16
    assert torch.equal(weights.embedding, state["model.embed_tokens.weight"])
    # The one is added in float32: bf16 would lose most of the stored weight's digits.
    expected = state["model.layers.1.input_layernorm.weight"].float() + 1.0
    assert torch.equal(weights.layers[1].attention_norm, expected)


def test_progress_runs_to_the_end(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save_folder(tiny_model("llama"), tmp_path))
    seen: list[tuple[int, int]] = []
    load(checkpoint, torch.float32, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)


def edited(tmp_path: Path, **tensors: Tensor | None) -> Path:
    """A llama folder with some tensors replaced, added or (None) taken away."""
    folder = save_folder(tiny_model("llama"), tmp_path)
    state = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor is None:
            del state[name]
        else:
            state[name] = tensor
    save_file(state, folder / "model.safetensors")
    return folder


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    with pytest.raises(BrokenModelFile, match=rf"lacks 1 of the \d+ tensors.*{name}"):
        load(open_checkpoint(edited(tmp_path, **{name: None})), torch.float32)


def test_missing_tensors_fail_at_allocation_and_unreadable_ones_at_filling(
    tmp_path: Path,
) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    with pytest.raises(BrokenModelFile, match=name):
        unfilled_weights(open_checkpoint(edited(tmp_path / "edited", **{name: None})), torch.float32)
    checkpoint = open_checkpoint(save_folder(tiny_model("llama"), tmp_path / "whole"))
    whole = load(checkpoint, torch.float32)
    destination = unfilled_weights(checkpoint, torch.float32)
    destination.weights.embedding.fill_(7.0)
    assert destination.filled() is destination.weights and torch.equal(destination.weights.embedding, whole.embedding)
    later = unfilled_weights(checkpoint, torch.float32)
    (tmp_path / "whole" / "model.safetensors").unlink()
    with pytest.raises(BrokenModelFile, match="cannot be read"):
        later.fill()


def test_left_over_tensors_are_named(tmp_path: Path) -> None:
    name = "model.layers.2.self_attn.q_proj.lora_A.weight"
    with pytest.raises(BrokenModelFile, match=name):
        load(open_checkpoint(edited(tmp_path, **{name: torch.zeros(2)})), torch.float32)


def test_a_layer_too_many_is_left_over(tmp_path: Path) -> None:
    name = "model.layers.4.input_layernorm.weight"
    with pytest.raises(BrokenModelFile, match=name):
        load(open_checkpoint(edited(tmp_path, **{name: torch.zeros(64)})), torch.float32)


def test_wrong_shapes_give_both(tmp_path: Path) -> None:
    wrong = {"model.layers.0.mlp.down_proj.weight": torch.zeros(64, 95)}
    with pytest.raises(BrokenModelFile, match=r"\(64, 95\).*\(64, 96\)"):
        load(open_checkpoint(edited(tmp_path, **wrong)), torch.float32)


def test_rotary_buffers_and_the_copy_of_a_tied_head_are_ignored(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=True)
    folder = save_folder(model, tmp_path)
    state = load_file(folder / "model.safetensors")
    state["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
    state["lm_head.weight"] = torch.zeros(80, 64)
    save_file(state, folder / "model.safetensors")
    weights = load(open_checkpoint(folder), torch.float32)
    assert torch.equal(weights.head, model.state_dict()["model.embed_tokens.weight"])


def test_an_encoding_that_cannot_be_decoded_is_named_with_its_tensor(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    folder = edited(tmp_path, **{name: torch.zeros(64, 96).to(torch.float8_e4m3fn)})
    with pytest.raises(UnsupportedModel, match=rf"{name}.*F8_E4M3"):
        load(open_checkpoint(folder), torch.float32)
    model = tiny_model("qwen2")
    tensors = gguf_tensors("qwen2", model)
    path = write_gguf(tmp_path / "m.gguf", "qwen2", gguf_metadata("qwen2", model.config), tensors)
    content = bytearray(path.read_bytes())
    place = content.index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 2 * 8
    content[place] = GGMLQuantizationType.I32
    path.write_bytes(bytes(content))
    with pytest.raises(UnsupportedModel, match=r"token_embd\.weight.*I32"):
        load(open_checkpoint(path), torch.float32)


def test_the_default_model_loads(default_model_path: Path) -> None:
    checkpoint = open_checkpoint(default_model_path)
    weights = load(checkpoint, torch.bfloat16)
    assert weights.head is weights.embedding and len(weights.layers) == 30
    stored = checkpoint.tensors["blk.7.attn_k.weight"]
    packed = np.fromfile(stored.path, np.uint8, stored.num_bytes, offset=stored.offset).reshape(192, -1)
    keys = torch.from_numpy(gguf.quants.dequantize(packed, GGMLQuantizationType.Q4_1)).view(3, 32, 2, 576)
    expected = keys.transpose(1, 2).reshape(192, 576).to(torch.bfloat16)
    assert torch.equal(weights.layers[7].qkv[576 : 576 + 192], expected)
