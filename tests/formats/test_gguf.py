"""Opening a GGUF file: the default model, every architecture, and what is refused."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from quire.core.errors import BrokenModelFile, ModelNotFound, UnsupportedModel
from quire.core.model import RopeKind
from quire.formats.checkpoint import CheckpointSource
from quire.formats.gguf_file import read_gguf
from quire.formats.open_checkpoint import open_checkpoint
from tests.formats.tiny import FAMILY_NAMES, gguf_metadata, gguf_tensors, tiny_gguf, tiny_model, write_gguf


def test_the_default_model(default_model_path: Path) -> None:
    checkpoint = open_checkpoint(default_model_path)
    spec = checkpoint.spec
    assert checkpoint.source is CheckpointSource.GGUF and checkpoint.end_ids == (2,)
    assert (spec.family, spec.num_layers, spec.hidden_size, spec.ffn_size) == ("llama", 30, 576, 1536)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.vocab_size, spec.max_positions, spec.tied_embeddings) == (49152, 8192, True)
    assert (spec.rope.theta, spec.rope.rotary_dim, spec.rope.kind) == (100_000.0, 64, RopeKind.PLAIN)
    assert np.float32(spec.norm_eps) == np.float32(1e-5)


def test_the_header_agrees_with_the_gguf_package(tmp_path: Path) -> None:
    tokens = ["a", "ü", "", "<0x0A>"]
    extra = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.5, -1.0], "general.flag": True}
    path = write_gguf(tmp_path / "m.gguf", "llama", {**extra, "general.count": 7}, {"x": np.ones((3, 32))})
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    for key, value in ours.metadata.items():
        assert value == theirs.fields[key].contents(), key
    assert ours.metadata["tokenizer.ggml.tokens"] == tokens
    for tensor in theirs.tensors:
        stored = ours.tensors[tensor.name]
        assert (stored.offset, stored.num_bytes) == (tensor.data_offset, tensor.n_bytes)
        assert stored.shape == tuple(reversed(tensor.shape.tolist()))


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_architecture(tmp_path: Path, family: str) -> None:
    spec = open_checkpoint(tiny_gguf(tmp_path / "m.gguf", family)).spec
    config = tiny_model(family).config
    assert spec.family == ("llama" if family == "mistral" else family)
    assert spec.head_dim == (getattr(config, "head_dim", None) or 16)
    assert (spec.num_heads, spec.num_kv_heads, spec.vocab_size, spec.rope.theta) == (4, 2, 80, 20_000.0)
    assert spec.tied_embeddings == config.tie_word_embeddings
    assert spec.qkv_bias == (family in ("llama", "qwen2"))
    assert spec.output_bias == spec.mlp_bias == (family == "llama")
    assert spec.qk_norm == (family in ("qwen3", "gemma3"))
    assert spec.sandwich_norms == family.startswith("gemma")


def test_windows_as_llama_cpp_defines_them(tmp_path: Path) -> None:
    gemma2 = open_checkpoint(tiny_gguf(tmp_path / "2.gguf", "gemma2")).spec
    assert gemma2.windows == (12, 0, 12, 0)
    assert (gemma2.attention_softcap, gemma2.final_softcap) == (50.0, 30.0)
    assert (gemma2.embedding_scale, gemma2.scale) == (8.0, pytest.approx(32**-0.5))
    gemma3 = open_checkpoint(tiny_gguf(tmp_path / "3.gguf", "gemma3")).spec
    assert gemma3.windows == (12, 12, 12, 12)  # four layers; the sixth would be the first without
    assert gemma3.local_rope is not None and gemma3.local_rope.theta == 10_000.0
    assert open_checkpoint(tiny_gguf(tmp_path / "p.gguf", "phi3")).spec.windows == (12,) * 4


def test_a_window_pattern_in_the_file_wins(tmp_path: Path) -> None:
    listed = {"gemma3__attention__sliding_window_pattern": [True, False, True, False]}
    assert open_checkpoint(tiny_gguf(tmp_path / "l.gguf", "gemma3", **listed)).spec.windows == (12, 0, 12, 0)
    period = {"gemma3__attention__sliding_window_pattern": 3, "gemma3__rope__freq_base_swa": 5000.0}
    spec = open_checkpoint(tiny_gguf(tmp_path / "p.gguf", "gemma3", **period)).spec
    assert spec.windows == (12, 12, 0, 12)
    assert spec.layer_rope(0).theta == 5000.0 and spec.layer_rope(2).theta == 20_000.0


def test_rope_factors_of_llama3(tmp_path: Path) -> None:
    model = tiny_model("llama")
    tensors = {**gguf_tensors("llama", model), "rope_freqs.weight": np.linspace(1, 8, 8, dtype=np.float32)}
    path = write_gguf(tmp_path / "m.gguf", "llama", gguf_metadata("llama", model.config), tensors)
    rope = open_checkpoint(path).spec.rope
    assert rope.kind is RopeKind.FACTORS and rope.short_factors == tuple(
        np.linspace(1, 8, 8, dtype=np.float32).tolist()
    )


def test_longrope_of_phi3(tmp_path: Path) -> None:
    model = tiny_model("phi3")
    metadata = gguf_metadata("phi3", model.config)
    metadata |= {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.scaling.attn_factor": 1.25}
    factors = {f"rope_factors_{word}.weight": np.full(4, n, np.float32) for word, n in (("short", 1), ("long", 3))}
    path = write_gguf(tmp_path / "m.gguf", "phi3", metadata, {**gguf_tensors("phi3", model), **factors})
    rope = open_checkpoint(path).spec.rope
    assert (rope.kind, rope.rotary_dim, rope.original_max_positions) == (RopeKind.LONGROPE, 8, 64)
    assert (rope.attention_factor, rope.factor) == (1.25, 4.0)
    assert (rope.short_factors, rope.long_factors) == ((1.0,) * 4, (3.0,) * 4)


def test_linear_and_yarn_scaling(tmp_path: Path) -> None:
    linear = {"qwen2__rope__scaling__type": "linear", "qwen2__rope__scaling__factor": 4.0}
    rope = open_checkpoint(tiny_gguf(tmp_path / "l.gguf", "qwen2", **linear)).spec.rope
    assert (rope.kind, rope.factor) == (RopeKind.LINEAR, 4.0)
    del linear["qwen2__rope__scaling__type"]  # a factor alone means linear, as in llama.cpp
    assert open_checkpoint(tiny_gguf(tmp_path / "f.gguf", "qwen2", **linear)).spec.rope == rope
    yarn = {
        **linear,
        "qwen2__rope__scaling__type": "yarn",
        "qwen2__rope__scaling__original_context_length": 64,
    }
    rope = open_checkpoint(tiny_gguf(tmp_path / "y.gguf", "qwen2", **yarn)).spec.rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == (RopeKind.YARN, 4.0, 64)


def test_several_end_tokens(tmp_path: Path) -> None:
    ends = {"tokenizer__ggml__eos_token_id": 3, "tokenizer__ggml__eot_token_id": 5}
    assert open_checkpoint(tiny_gguf(tmp_path / "m.gguf", "llama", **ends)).end_ids == (3, 5)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama__expert_count": 8}, "mixture of experts"),
        ({"general__type": "adapter"}, "adapter"),
        ({"split__count": 3}, "3 parts"),
        ({"llama__rope__scaling__type": "odd", "llama__rope__scaling__factor": 2.0}, "odd"),
        ({"llama__attention__value_length": 8}, "different widths"),
        ({"llama__attention__head_count_kv": [1, 2, 2, 2]}, "differs by layer"),
    ],
)
def test_unsupported_files_are_refused_by_name(tmp_path: Path, extra: dict[str, object], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        open_checkpoint(tiny_gguf(tmp_path / "m.gguf", "llama", **extra))


def test_an_unknown_architecture_is_refused_with_the_nearest(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", "qwen3moe", {}, {})
    with pytest.raises(UnsupportedModel, match=r"qwen3moe.*nearest is qwen3"):
        open_checkpoint(path)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    metadata = gguf_metadata("llama", model.config)
    del metadata["llama.block_count"]
    path = write_gguf(tmp_path / "m.gguf", "llama", metadata, gguf_tensors("llama", model))
    with pytest.raises(BrokenModelFile, match=r"llama\.block_count"):
        open_checkpoint(path)


def test_a_folder_with_one_gguf_file_is_that_file(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "a.gguf", "llama")
    assert open_checkpoint(tmp_path).path == path
    (tmp_path / "b.gguf").write_bytes(path.read_bytes())
    with pytest.raises(ModelNotFound, match=r"a\.gguf, b\.gguf"):
        open_checkpoint(tmp_path)
