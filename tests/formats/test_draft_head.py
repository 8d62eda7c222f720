"""Heads that draft: what is read of their files, and what is refused before weights are read."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire.core.errors import BrokenModelFile, ConfigError, QuireError
from quire.core.model import ModelSpec, RopeSpec
from quire.formats.draft_head import open_eagle_head, open_mtp_layer
from quire.formats.hf_folder import open_folder
from quire.weights.draft_head_weights import load_draft_head
from quire.weights.names import expected_tensors
from tests.llm.tiny import VOCAB, tiny_llama
from tests.models.eagle_reference import ReferenceHead
from tests.models.mtp_reference import ReferenceMtpLayer, tiny_qwen2

TARGET = ModelSpec("llama", 12, 64, 4, 2, 16, 96, VOCAB, 512, 1e-6, RopeSpec(10_000.0, 16), tied_embeddings=False)
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def reference() -> ReferenceHead:
    return ReferenceHead(tiny_llama(), (2, 6, 9))


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({IDS: None}, (2, 6, 9)),
        ({IDS: [1, 5, 10]}, (1, 5, 10)),
        ({IDS: None, "eagle_config": {IDS: [1, 5, 8]}}, (2, 6, 9)),
    ],
)
def test_the_layers_that_a_head_reads(
    reference: ReferenceHead, tmp_path: Path, changes: dict[str, object], layers: tuple[int, ...]
) -> None:
    """By default the third, the middle one and the third from the end; SGLang names the layers before."""
    spec = open_eagle_head(reference.write(tmp_path, **changes), TARGET, "the model").spec
    assert spec.captured_layers == layers and spec.layer.vocab_size == len(reference.d2t)
    assert spec.maps_tokens and not spec.own_embedding


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden_size": 128}, r"a model with hidden states of 128, and the model has 64. Use the head"),
        ({"vocab_size": 300}, r"a model with a vocabulary of 300, and the model has 259"),
        ({IDS: [2, 6, 12]}, r"what enters the layers 2, 6, 12, counted from 0, and the model has 12 layers"),
        ({IDS: [2, 6]}, r"fc.weight in .* has the shape \(64, 192\), but .* require \(64, 128\)"),
        ({"num_hidden_layers": 2}, r"a head with 2 layers and mlp_bias false; quire reads EAGLE-3 heads of one layer"),
        ({"draft_vocab_size": 300}, r"draft_vocab_size in .* must be a whole number from 1 to 259, not 300"),
        ({"draft_vocab_size": 100}, r"lm_head.weight in .* has the shape \(128, 64\), but .* require \(100, 64\)"),
        ({"without": "fc.weight"}, r"lacks tensors that an EAGLE-3 head needs: fc.weight\."),
        ({"without": "d2t"}, r"lacks tensors that an EAGLE-3 head needs: d2t\."),
        ({"attention_bias": True}, r"lacks tensors that .*: midlayer.self_attn.k_proj.bias, midlayer.self_attn"),
        ({"prefix": "draft."}, r"lacks tensors that .*: d2t, fc.weight, lm_head.weight, .* and more"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, r"is a LlamaForCausalLMEagle, and no EAGLE-3 head that quire"),
        ({"architectures": ["DeepseekV3ForCausalLMNextN"]}, r"NextN: multi-token-prediction layers, which qu"),
        ({"architectures": ["Qwen3NextMTP"]}, r"is a Qwen3NextMTP: .* and only of MiMoForCausalLM\."),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantized with gptq, which quire does not read yet"),
    ],
)  # fmt: skip
def test_heads_that_do_not_fit_are_refused(
    reference: ReferenceHead, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    folder = reference.write(tmp_path, **changes)  # type: ignore[arg-type]
    with pytest.raises(QuireError, match=message):
        open_eagle_head(folder, TARGET, "the model")


def test_a_head_of_another_width_needs_an_embedding(reference: ReferenceHead, tmp_path: Path) -> None:
    folder = reference.write(tmp_path, target_hidden_size=64)
    wide = replace(TARGET, hidden_size=128)
    with pytest.raises(QuireError, match="hidden states of 64, and the model has 128"):
        open_eagle_head(folder, wide, "the model")
    folder = reference.write(tmp_path, target_hidden_size=128)
    with pytest.raises(BrokenModelFile, match=r"lacks tensors that an EAGLE-3 head needs: embed_tokens\.weight"):
        open_eagle_head(folder, wide, "the model")
    (folder / "config.json").unlink()
    with pytest.raises(QuireError, match=r"has no config\.json, so it is not the folder of an EAGLE-3 head"):
        open_eagle_head(folder, TARGET, "the model")


def test_a_map_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    reference = ReferenceHead(tiny_llama(), (2, 6, 9))
    reference.d2t[-1] += 40
    checkpoint = open_eagle_head(reference.write(tmp_path), TARGET, "the model")
    with pytest.raises(BrokenModelFile, match="128 draft tokens to 128 tokens from 3 to 297; each needs its own, from"):
        load_draft_head(checkpoint, torch.float32, torch.device("cpu"))


def test_the_layer_among_the_tensors_of_a_model(tmp_path: Path) -> None:
    checkpoint = open_folder(ReferenceMtpLayer(tiny_qwen2()).write(tmp_path))
    head = open_mtp_layer(checkpoint, "the model", "mtp")
    assert head.spec.captured_layers == (2,) and head.spec.layer.num_layers == 1 and checkpoint.spec.num_layers == 2
    assert not (head.spec.own_embedding or head.spec.own_head or head.spec.maps_tokens) and head.spec.layer.qkv_bias
    assert sorted({*expected_tensors(checkpoint.spec, checkpoint.source)} ^ {*checkpoint.tensors}) == sorted(
        f"model.mtp_layers.0.{name}" for name in head.tensors
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"without": "input_proj.weight"}, r"\(model.mtp_layers.0\) lacks tensors that a multi-token-prediction layer"),
        ({"without": "self_attn.k_proj.bias"}, r"multi-token-prediction layer needs: self_attn.k_proj.bias\."),
        ({"copies": 2}, r"has 2 multi-token-prediction layers \(model.mtp_layers.\*, numbered 0, 1\); quire reads"),
        ({"intermediate_size": 80}, r"mtp_layers.0.mlp.gate_proj.weight in .* shape \(96, 64\), but .* \(80, 64\)"),
    ],
)  # fmt: skip
def test_layers_that_do_not_fit_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    folder = ReferenceMtpLayer(tiny_qwen2()).write(tmp_path, **changes)  # type: ignore[arg-type]
    with pytest.raises(QuireError, match=message):
        open_mtp_layer(open_folder(folder), "the model", "mtp")


def test_a_model_of_another_family_has_no_layer(tmp_path: Path) -> None:
    tiny_llama().save_pretrained(tmp_path)
    with pytest.raises(
        ConfigError, match=r"speculative is tree\+mtp, and the model is a llama: it has no multi-token-"
    ):
        open_mtp_layer(open_folder(tmp_path), "the model", "tree+mtp")
