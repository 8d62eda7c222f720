"""Tiny random models of every family, twice: as transformers builds them, and as our spec and weights.

An independent statement of how a checkpoint maps to our vocabulary; it shares nothing with the loader.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers
from torch import Tensor

from quire.core.model import ModelSpec, RopeKind, RopeSpec
from quire.models.parameters import DecoderWeights, LayerWeights

VOCAB = 120
HIDDEN, FFN, HEADS, KV_HEADS, DIM, LAYERS = 64, 96, 4, 2, 16, 3
MAX_POSITIONS = 256
WINDOW = 8
SHORT = tuple(1.0 + 0.1 * i for i in range(DIM // 2))
LONG = tuple(2.0 + 0.5 * i for i in range(DIM // 2))


@dataclass(frozen=True)
class Twin:
    """One model in both forms."""

    peer: transformers.PreTrainedModel
    spec: ModelSpec
    weights: DecoderWeights


@dataclass(frozen=True)
class Family:
    """How to build it there, and what differs from a plain Llama here."""

    name: str
    model: type[transformers.PreTrainedModel]
    config: type[transformers.PretrainedConfig]
    arguments: dict[str, object]
    spec: dict[str, object]
    unit_offset_norms: bool = False  # Gemma stores norm weights minus one


def rope(theta: float = 10000.0, **values: object) -> RopeSpec:
    return RopeSpec(theta=theta, rotary_dim=DIM, **values)  # type: ignore[arg-type]


def peer_rope(kind: str, theta: float = 10000.0, **values: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **values}}


LLAMA = (transformers.LlamaForCausalLM, transformers.LlamaConfig)
QWEN2 = (transformers.Qwen2ForCausalLM, transformers.Qwen2Config)
PHI3 = (transformers.Phi3ForCausalLM, transformers.Phi3Config)
NO_PAD = {"pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
GEMMA_SPEC = {
    "activation": "gelu_tanh",
    "sandwich_norms": True,
    "embedding_scale": HIDDEN**0.5,
    "attention_scale": 24**-0.5,
    "tied_embeddings": True,
    "windows": (WINDOW, 0, WINDOW),
}
GEMMA_ARGUMENTS = {
    "query_pre_attn_scalar": 24,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "tie_word_embeddings": True,
}
LONGROPE = {"short_factor": list(SHORT), "long_factor": list(LONG), "original_max_position_embeddings": 32}

FAMILIES = [
    Family("llama2", *LLAMA, {}, {}),
    Family("llama-tied", *LLAMA, {"tie_word_embeddings": True}, {"tied_embeddings": True}),
    Family(
        "llama3",
        *LLAMA,
        peer_rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
        {"rope": rope(kind=RopeKind.LLAMA3, factor=8.0, original_max_positions=32)},
    ),
    Family("linear", *LLAMA, peer_rope("linear", factor=4.0), {"rope": rope(kind=RopeKind.LINEAR, factor=4.0)}),
    Family(
        "yarn",
        *LLAMA,
        peer_rope("yarn", factor=4.0, original_max_position_embeddings=64),
        {"rope": rope(kind=RopeKind.YARN, factor=4.0, original_max_positions=64)},
    ),
    Family(
        "yarn-mscale",
        *LLAMA,
        peer_rope(
            "yarn",
            factor=4.0,
            original_max_position_embeddings=64,
            mscale=0.7,
            mscale_all_dim=1.3,
            truncate=False,
        ),
        {
            "rope": rope(
                kind=RopeKind.YARN,
                factor=4.0,
                original_max_positions=64,
                mscale=0.7,
                mscale_all_dim=1.3,
                truncate=False,
            )
        },
    ),
    Family(
        "mistral",
        transformers.MistralForCausalLM,
        transformers.MistralConfig,
        {"sliding_window": WINDOW},
        {"windows": (WINDOW,) * LAYERS},
    ),
    Family("qwen2", *QWEN2, {}, {"qkv_bias": True}),
    Family("qwen3", transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {"head_dim": DIM}, {"qk_norm": True}),
    Family(
        "gemma2",
        transformers.Gemma2ForCausalLM,
        transformers.Gemma2Config,
        {**GEMMA_ARGUMENTS, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0},
        {**GEMMA_SPEC, "attention_softcap": 3.0, "final_softcap": 2.0},
        unit_offset_norms=True,
    ),
    Family(
        "gemma3",
        transformers.Gemma3ForCausalLM,
        transformers.Gemma3TextConfig,
        {
            **GEMMA_ARGUMENTS,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        {
            **GEMMA_SPEC,
            "qk_norm": True,
            "rope": rope(1e6, kind=RopeKind.LINEAR, factor=8.0),
            "local_rope": rope(1e4),
        },
        unit_offset_norms=True,
    ),
    Family("phi3", *PHI3, NO_PAD, {}),
    Family(
        "phi3-partial",
        *PHI3,
        {**NO_PAD, **peer_rope("default", partial_rotary_factor=0.5)},
        {"rope": RopeSpec(theta=10000.0, rotary_dim=DIM // 2)},
    ),
    Family(
        "phi3-longrope",
        *PHI3,
        {**NO_PAD, **peer_rope("longrope", **LONGROPE), "original_max_position_embeddings": 32},
        {
            "rope": rope(
                kind=RopeKind.LONGROPE,
                factor=MAX_POSITIONS / 32,
                original_max_positions=32,
                short_factors=SHORT,
                long_factors=LONG,
            )
        },
    ),
]


def build(family: Family, dtype: torch.dtype = torch.float32, seed: int = 0, device: str = "cpu") -> Twin:
    common: dict[str, object] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": DIM,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    if "rope_parameters" not in family.arguments:
        common |= peer_rope("default")
    config = family.config(**(common | family.arguments), attn_implementation="eager")
    torch.manual_seed(seed)
    peer = family.model(config).eval()
    with torch.no_grad():  # as made, norms are all one and biases all zero: nothing would notice them
        for parameter in peer.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn_like(parameter)
            else:
                parameter *= 4
    peer = peer.to(device, dtype)
    values: dict[str, object] = {"rope": rope(), "tied_embeddings": False} | family.spec
    spec = ModelSpec(
        family=family.name,
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        ffn_size=FFN,
        vocab_size=VOCAB,
        max_positions=MAX_POSITIONS,
        norm_eps=1e-5,
        **values,  # type: ignore[arg-type]
    )
    return Twin(peer, spec, _weights(peer.state_dict(), spec, family.unit_offset_norms))


def _weights(state: dict[str, Tensor], spec: ModelSpec, unit_offset_norms: bool) -> DecoderWeights:
    def norm(name: str) -> Tensor | None:
        if name not in state:
            return None
        return state[name].float() + (1.0 if unit_offset_norms else 0.0)

    embedding = state["model.embed_tokens.weight"]
    final_norm = norm("model.norm.weight")
    assert final_norm is not None
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(_layer(state, f"model.layers.{i}.", spec, norm) for i in range(spec.num_layers)),
        final_norm=final_norm,
        head=embedding if spec.tied_embeddings else state["lm_head.weight"],
    )


def _layer(
    state: dict[str, Tensor], prefix: str, spec: ModelSpec, norm: Callable[[str], Tensor | None]
) -> LayerWeights:
    def joined(whole: str, *parts: str) -> Tensor | None:
        if prefix + whole in state:
            return state[prefix + whole]
        found = [state[prefix + part] for part in parts if prefix + part in state]
        return torch.cat(found) if found else None

    query, key, value = (f"self_attn.{letter}_proj." for letter in "qkv")
    mlp_norm = "pre_feedforward_layernorm" if spec.sandwich_norms else "post_attention_layernorm"
    return LayerWeights(
        attention_norm=norm(prefix + "input_layernorm.weight"),
        qkv=joined("self_attn.qkv_proj.weight", query + "weight", key + "weight", value + "weight"),
        qkv_bias=joined("self_attn.qkv_proj.bias", query + "bias", key + "bias", value + "bias"),
        query_norm=norm(prefix + "self_attn.q_norm.weight"),
        key_norm=norm(prefix + "self_attn.k_norm.weight"),
        output=state[prefix + "self_attn.o_proj.weight"],
        output_bias=None,
        attention_post_norm=norm(prefix + "post_attention_layernorm.weight") if spec.sandwich_norms else None,
        mlp_norm=norm(prefix + mlp_norm + ".weight"),
        gate_up=joined("mlp.gate_up_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight"),
        gate_up_bias=None,
        down=state[prefix + "mlp.down_proj.weight"],
        down_bias=None,
        mlp_post_norm=norm(prefix + "post_feedforward_layernorm.weight"),
    )
