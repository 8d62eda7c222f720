"""A config.json, old or new, gives the description that transformers would compute with."""

from dataclasses import replace

import pytest

from quire.core.errors import BrokenModelFile, QuireError, UnsupportedModel
from quire.core.model import ModelSpec, RopeKind, RopeSpec
from quire.formats.hf_config import read_spec
from quire.formats.json_fields import JsonFields
from quire.formats.presets import SHAPES, dummy_checkpoint
from tests.formats.tiny import FAMILY_NAMES, LAYERS, tiny_config

LLAMA: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 80,
    "max_position_embeddings": 8192,
}


def spec_of(config: dict[str, object]) -> ModelSpec:
    return read_spec(JsonFields(config, "config.json"))


def saved(family: str, **changes: object) -> ModelSpec:
    config = tiny_config(family, **changes).to_diff_dict()
    config.setdefault("architectures", None)
    return spec_of(config)


def test_published_llama_config_is_the_named_shape() -> None:
    published = {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 128256,
    }
    assert spec_of(published) == SHAPES["llama-3.1-8b"]


def test_published_qwen3_config_is_the_named_shape() -> None:
    published = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    assert spec_of(published) == SHAPES["qwen3-0.6b"]


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_every_family_is_read_as_transformers_saves_it(family: str) -> None:
    config = tiny_config(family)
    spec = saved(family)
    assert spec.family == family
    assert (spec.num_layers, spec.hidden_size, spec.ffn_size) == (LAYERS, 64, 96)
    assert (spec.num_heads, spec.num_kv_heads, spec.vocab_size, spec.max_positions) == (4, 2, 80, 256)
    assert spec.head_dim == (getattr(config, "head_dim", None) or 16)
    assert spec.norm_eps == config.rms_norm_eps
    assert spec.tied_embeddings == config.tie_word_embeddings


def test_published_mimo_config_is_a_qwen2() -> None:
    """Its file says attention_bias, which only queries, keys and values have; and asks for code, which is not run."""
    published = {
        "architectures": ["MiMoForCausalLM"], "auto_map": {"AutoModel": "modeling_mimo.MiMoModel"},
        "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 32768,
        "max_window_layers": 32, "model_type": "mimo", "num_attention_heads": 32, "head_dim": 128,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 640000,
        "sliding_window": 32768, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151680,
        "attention_bias": True, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    spec = spec_of(published)
    assert spec == replace(spec_of(published | {"architectures": ["Qwen2ForCausalLM"]}), family="mimo")
    assert (spec.head_dim, spec.rope, spec.windows) == (128, RopeSpec(640_000.0, 128), ())
    assert spec.qkv_bias and not spec.output_bias and spec_of(published | {"architectures": None}) == spec


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("llama", {"qkv_bias": True, "output_bias": True, "mlp_bias": True, "windows": ()}),
        ("mistral", {"qkv_bias": False, "windows": (24, 24, 24, 24)}),
        ("qwen2", {"qkv_bias": True, "output_bias": False, "windows": (0, 0, 0, 20)}),
        ("qwen3", {"qkv_bias": False, "qk_norm": True, "windows": (), "tied_embeddings": True}),
        (
            "gemma2",
            {
                "activation": "gelu_tanh",
                "sandwich_norms": True,
                "qk_norm": False,
                "embedding_scale": 8.0,
                "attention_scale": 24**-0.5,
                "attention_softcap": 50.0,
                "final_softcap": 30.0,
                "windows": (12, 0, 12, 0),
                "tied_embeddings": True,
            },
        ),
        (
            "gemma3",
            {
                "activation": "gelu_tanh",
                "sandwich_norms": True,
                "qk_norm": True,
                "attention_scale": 24**-0.5,
                "attention_softcap": 0.0,
                "final_softcap": 0.0,
                "windows": (12, 12, 0, 12),
            },
        ),
        ("phi3", {"qkv_bias": False, "windows": (30, 30, 30, 30)}),
    ],
)
def test_features_of_each_family(family: str, expected: dict[str, object]) -> None:
    spec = saved(family)
    assert {key: getattr(spec, key) for key in expected} == expected


def test_gemma3_ropes_differ_by_layer() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    spec = saved("gemma3", rope_theta=500_000.0, rope_local_base_freq=7_000.0, rope_scaling=scaling)
    assert (spec.layer_rope(2).theta, spec.layer_rope(2).kind, spec.layer_rope(2).factor) == (
        500_000.0,
        RopeKind.LINEAR,
        8.0,
    )
    assert (spec.layer_rope(0).theta, spec.layer_rope(0).kind) == (7_000.0, RopeKind.PLAIN)


def test_gemma3_old_and_new_spelling_agree() -> None:
    old = tiny_config("gemma3").to_diff_dict()
    parameters = old.pop("rope_parameters")
    old |= {"rope_theta": parameters["full_attention"]["rope_theta"], "rope_scaling": None}
    old |= {"rope_local_base_freq": parameters["sliding_attention"]["rope_theta"]}
    del old["layer_types"]
    old["sliding_window_pattern"] = 3
    assert spec_of(old) == saved("gemma3")


def test_softcaps_set_to_null_are_off() -> None:
    spec = saved("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (spec.attention_softcap, spec.final_softcap) == (0.0, 0.0)


def test_mistral_window_of_null_means_none() -> None:
    assert saved("mistral", sliding_window=None).windows == ()


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("word", ["type", "rope_type"])
def test_yarn_is_read_in_every_spelling(key: str, word: str) -> None:
    scaling = {word: "yarn", "factor": 4.0, "original_max_position_embeddings": 2048, "beta_fast": 16}
    scaling |= {"mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False, "attention_factor": 1.2}
    rope = spec_of({**LLAMA, "rope_theta": 5e5, key: scaling}).rope
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_positions) == (
        RopeKind.YARN,
        5e5,
        4.0,
        2048,
    )
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16.0, 1.0, False)
    assert (rope.mscale, rope.mscale_all_dim, rope.attention_factor) == (0.7, 0.5, 1.2)


@pytest.mark.parametrize("word", ["longrope", "su", "yarn"])
def test_phi3_longrope(word: str) -> None:
    config = tiny_config("phi3").to_diff_dict()
    del config["rope_parameters"]
    config["architectures"] = ["Phi3ForCausalLM"]
    config |= {"original_max_position_embeddings": 64, "partial_rotary_factor": 0.5, "rope_theta": 10_000.0}
    config["rope_scaling"] = {"type": word, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = spec_of(config).rope
    assert (rope.kind, rope.rotary_dim, rope.original_max_positions) == (RopeKind.LONGROPE, 8, 64)
    assert (rope.factor, rope.attention_factor) == (4.0, None)
    assert (rope.short_factors, rope.long_factors) == ((1.0,) * 4, (2.0,) * 4)


@pytest.mark.parametrize("kind", ["dynamic", "proportional", "mystery"])
def test_other_rope_scaling_is_refused_by_name(kind: str) -> None:
    with pytest.raises(UnsupportedModel, match=kind):
        spec_of({**LLAMA, "rope_scaling": {"rope_type": kind, "factor": 2.0}})


def test_an_unknown_architecture_is_refused_with_the_nearest() -> None:
    with pytest.raises(UnsupportedModel, match=r"Qwen3MoeForCausalLM.*nearest is Qwen3ForCausalLM"):
        spec_of({**LLAMA, "architectures": ["Qwen3MoeForCausalLM"]})


def test_a_multi_modal_model_is_refused_by_architecture() -> None:
    with pytest.raises(UnsupportedModel, match="Gemma3ForConditionalGeneration"):
        spec_of({"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"})


def test_code_from_the_folder_is_never_run() -> None:
    with pytest.raises(UnsupportedModel, match="remote code"):
        spec_of({"architectures": ["OddForCausalLM"], "auto_map": {"AutoModel": "odd.Odd"}})


def test_the_model_type_serves_where_no_architecture_is_named() -> None:
    assert spec_of({**LLAMA, "architectures": None, "model_type": "qwen2"}).family == "qwen2"


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": None},
        {"hidden_size": -1},
        {"hidden_size": "64"},
        {"num_hidden_layers": 10**9},
        {"num_attention_heads": True},
        {"num_key_value_heads": 3},
        {"num_attention_heads": 2**30},
        {"rms_norm_eps": float("nan")},
        {"rope_theta": 0},
        {"partial_rotary_factor": 1e308},
        {"rope_scaling": [1]},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}},
        {"head_dim": 17},
        {"hidden_act": "relu"},
        {"tie_word_embeddings": "yes"},
        {"architectures": "LlamaForCausalLM"},
    ],
)
def test_invalid_values_are_refused_in_a_sentence(change: dict[str, object]) -> None:
    with pytest.raises(QuireError) as raised:
        spec_of({**LLAMA, **change})
    assert "config.json" in raised.value.message


def test_a_missing_number_is_named() -> None:
    config = dict(LLAMA)
    del config["intermediate_size"]
    with pytest.raises(BrokenModelFile, match="intermediate_size"):
        spec_of(config)


def test_a_dummy_checkpoint_by_name() -> None:
    checkpoint = dummy_checkpoint("Qwen3-0.6B")
    assert checkpoint.spec == SHAPES["qwen3-0.6b"] and not checkpoint.tensors
    with pytest.raises(QuireError, match=r"qwen3-0\.6b"):
        dummy_checkpoint("qwen3-0.7b")


def test_a_spec_is_a_value() -> None:
    spec = spec_of(LLAMA)
    assert replace(spec) == spec and hash(spec) == hash(spec_of(dict(LLAMA)))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_position_embeddings": 1}, "1 positions"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "beta_fast -1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_slow": -1}}, "beta_slow -1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_theta": 1}, "base 1"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4, "high_freq_factor": 4}},
            "high_freq_factor 4",
        ),
        (
            {
                "rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
                "original_max_position_embeddings": 1,
            },
            "1 original positions",
        ),
    ],
)
def test_numbers_that_a_rope_would_divide_by_are_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(BrokenModelFile, match=words):
        spec_of({**LLAMA, **change})
