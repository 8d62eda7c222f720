"""Opens the folder of an EAGLE-3 head: config.json and the headers of its tensors, checked against the model.

As SpecForge, SGLang and the authors of EAGLE-3 write them: one decoder layer (`midlayer`) whose queries, keys and
values read the token's embedding beside a hidden state; `fc`, which makes that state of three of the model's;
a head over a smaller vocabulary, and `d2t`, by which a draft token differs from its token in the model. Never reads the
bytes of tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from quire.core.errors import BrokenModelFile, ModelNotFound, UnsupportedModel
from quire.core.model import EagleSpec, ModelSpec
from quire.formats.checkpoint import StoredTensor
from quire.formats.families import BY_NAME
from quire.formats.hf_config import read_spec
from quire.formats.hf_folder import CONFIG, index_tensors, read_json, refuse_quantized
from quire.formats.json_fields import JsonFields

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_PREDICTS_TOKENS = ("NextN", "MTP")  # in the architectures of multi-token-prediction layers
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MAX_LAYERS = 4
_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")


@dataclass(frozen=True, slots=True)
class EagleCheckpoint:
    """Everything about a head except its weights. Tensors are named as SpecForge names them."""

    path: Path
    spec: EagleSpec
    tensors: Mapping[str, StoredTensor]


def open_eagle_head(folder: Path, target: ModelSpec, target_name: str) -> EagleCheckpoint:
    """The head in a folder, if it fits the model."""
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(f"{folder} has no {CONFIG}, so it is not the folder of an EAGLE-3 head.")
    config = read_json(folder / CONFIG)
    _check_kind(config)
    refuse_quantized(config)
    layer = read_spec(config, BY_NAME["llama"])
    if layer.num_layers != 1 or layer.mlp_bias:
        raise UnsupportedModel(
            f"{config.source} is of a head with {layer.num_layers} layers and mlp_bias {str(layer.mlp_bias).lower()}; "
            f"quire reads EAGLE-3 heads of one layer without such biases."
        )
    _check_fit(config, layer, target, target_name)
    stored = {_canonical(name): tensor for name, tensor in index_tensors(folder).items()}
    spec = EagleSpec(
        layer=replace(
            layer,
            family="eagle3",
            vocab_size=config.integer("draft_vocab_size", target.vocab_size, high=target.vocab_size),
            tied_embeddings=False,
        ),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        captured_layers=_captured_layers(config, target, target_name),
        norm_before_residual=config.flag("norm_before_residual", False),
        own_embedding="embed_tokens.weight" in stored,
        maps_tokens="d2t" in stored,
    )
    _check_tensors(folder, spec, stored)
    return EagleCheckpoint(folder, spec, stored)


def _check_kind(config: JsonFields) -> None:
    names = config.texts("architectures") if config.has("architectures") else ()
    name = names[0] if names else "model of no named architecture"
    if name in _ARCHITECTURES or (name == "LlamaForCausalLM" and config.has("draft_vocab_size")):
        return
    if any(word in name for word in _PREDICTS_TOKENS):
        raise UnsupportedModel(
            f"{config.source} is a {name}: multi-token-prediction layers, which no family has that quire reads. Use an "
            f"EAGLE-3 head of the model, or --speculative auto."
        )
    raise UnsupportedModel(
        f"{config.source} is a {name}, and no EAGLE-3 head that quire reads: those are {' or '.join(_ARCHITECTURES)}. "
        f"For a whole model use --speculative draft:MODEL."
    )


def _check_fit(config: JsonFields, layer: ModelSpec, target: ModelSpec, target_name: str) -> None:
    """The model that the head was trained for is one like this."""
    hidden_size = config.integer("target_hidden_size", layer.hidden_size)
    for what, theirs, ours in (
        ("hidden states", hidden_size, target.hidden_size),
        ("a vocabulary", layer.vocab_size, target.vocab_size),
    ):
        if theirs != ours:
            raise UnsupportedModel(
                f"{config.source} is of an EAGLE-3 head for a model with {what} of {theirs}, and {target_name} has "
                f"{ours}. Use the head that was trained for {target_name}, or --speculative auto."
            )


def _captured_layers(config: JsonFields, target: ModelSpec, target_name: str) -> tuple[int, ...]:
    """The layers of the model whose inputs the head reads. SGLang's `eagle_config` names the layers before them, of
    which they are the outputs; vLLM's field names them themselves. By default the third, the middle one, and the third
    from the end."""
    nested, number = config.mapping("eagle_config"), target.num_layers
    if nested.has(_LAYER_IDS):
        layers = tuple(int(each) + 1 for each in nested.numbers(_LAYER_IDS))
    elif config.has(_LAYER_IDS):
        layers = tuple(int(each) for each in config.numbers(_LAYER_IDS))
    else:
        layers = (2, number // 2, number - 3)
    if not 1 <= len(layers) <= _MAX_LAYERS or min(layers) < 0 or max(layers) >= number:
        raise UnsupportedModel(
            f"{config.source} is of an EAGLE-3 head that reads what enters the layers {', '.join(map(str, layers))}, "
            f"counted from 0, and {target_name} has {number} layers. Use the head that was trained for {target_name}."
        )
    return layers


def _canonical(name: str) -> str:
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def eagle_shapes(spec: EagleSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head must have, by its name, and its shape."""
    layer, hidden = spec.layer, spec.layer.hidden_size
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(spec.captured_layers) * spec.target_hidden_size),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.mlp.gate_proj.weight": (layer.ffn_size, hidden),
        "midlayer.mlp.up_proj.weight": (layer.ffn_size, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, layer.ffn_size),
        "norm.weight": (hidden,),
        "lm_head.weight": (layer.vocab_size, hidden),
    }
    if layer.qkv_bias:
        for part, width in (("q", queries), ("k", keys), ("v", keys), ("o", hidden)):
            shapes[f"midlayer.self_attn.{part}_proj.bias"] = (width,)
    if spec.own_embedding or hidden != spec.target_hidden_size:
        shapes["embed_tokens.weight"] = (spec.target_vocab_size, hidden)
    if layer.vocab_size != spec.target_vocab_size or spec.maps_tokens:
        shapes["d2t"] = (layer.vocab_size,)
    return shapes


def _check_tensors(folder: Path, spec: EagleSpec, stored: Mapping[str, StoredTensor]) -> None:
    shapes = eagle_shapes(spec)
    missing = sorted(name for name in shapes if name not in stored)
    left_over = sorted(name for name in stored if name not in shapes and name != "t2d")
    for names, words in ((missing, "lacks tensors that an EAGLE-3 head needs"), (left_over, "holds other tensors")):
        if names:
            raise BrokenModelFile(f"{folder} {words}: {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}.")
    for name, shape in shapes.items():
        if stored[name].shape != shape:
            raise BrokenModelFile(
                f"Tensor {name} in {stored[name].path} has the shape {stored[name].shape}, but the configurations of "
                f"the head and the model require {shape}."
            )
        if stored[name].encoding not in (_INTEGERS if name == "d2t" else _FLOATS):
            raise UnsupportedModel(
                f"Tensor {name} in {stored[name].path} is stored as {stored[name].encoding}, which quire does not read "
                f"there; it reads {', '.join(_INTEGERS if name == 'd2t' else _FLOATS)}."
            )
