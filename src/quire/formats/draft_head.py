"""Opens a head that drafts: the headers of its tensors, checked against the model. Never reads the bytes of tensors.

An EAGLE-3 head has a folder of its own, with a config.json. As SpecForge, SGLang and the authors of EAGLE-3 write them:
one decoder layer (`midlayer`) whose queries, keys and values read the token's embedding beside a hidden state; `fc`,
which makes that state of three of the model's; a head over a smaller vocabulary, and `d2t`, by which a draft token
differs from its token in the model.

A multi-token-prediction layer is in the model's own files: one decoder layer as the model has, behind a matrix that
joins the embedding and a hidden state. Embedding and head are the model's.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import BrokenModelFile, ConfigError, ModelNotFound, UnsupportedModel
from quire.core.model import DraftHeadSpec, ModelSpec
from quire.formats.checkpoint import Checkpoint, StoredTensor
from quire.formats.families import BY_NAME, FAMILIES
from quire.formats.hf_config import read_spec
from quire.formats.hf_folder import CONFIG, index_tensors, read_json, refuse_quantized
from quire.formats.json_fields import JsonFields

_ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_PREDICTS_TOKENS = ("NextN", "MTP")  # in the architectures of multi-token-prediction layers
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MAX_LAYERS = 4
_WITH_LAYERS = ", ".join(family.architecture for family in FAMILIES if family.mtp_layers)
DUMMY_HEAD = "dummy"  # instead of a folder, with dummy weights of the model
_FLOATS = ("F64", "F32", "F16", "BF16")
_INTEGERS = ("I64", "I32")


class HeadNames(NamedTuple):
    """How the tensors of one kind of head are named; empty: it has none."""

    title: str  # in messages
    layer: str  # how names in its layer begin
    token_norm: str  # of the embedding
    state_norm: str
    fuse: str  # makes one state of several of the model's
    join: str  # makes one vector of state and embedding; without it, queries, keys and values read both
    final_norm: str
    head: str


HEAD_NAMES = {  # by what they are as drafters
    "eagle": HeadNames(
        "an EAGLE-3 head",
        "midlayer.",
        "midlayer.input_layernorm.weight",
        "midlayer.hidden_norm.weight",
        "fc.weight",
        "",
        "norm.weight",
        "lm_head.weight",
    ),
    "mtp": HeadNames(
        "a multi-token-prediction layer",
        "",
        "token_layernorm.weight",
        "hidden_layernorm.weight",
        "",
        "input_proj.weight",
        "final_layernorm.weight",
        "",
    ),
}


@dataclass(frozen=True, slots=True)
class DraftHeadCheckpoint:
    """Everything about a head except its weights. Tensors are named by `HEAD_NAMES`."""

    path: Path
    spec: DraftHeadSpec
    tensors: Mapping[str, StoredTensor]  # none: dummy weights


def open_eagle_head(folder: Path, target: ModelSpec, target_name: str) -> DraftHeadCheckpoint:
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
    spec = DraftHeadSpec(
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
    _check_tensors(str(folder), spec, stored)
    return DraftHeadCheckpoint(folder, spec, stored)


def dummy_head(target: ModelSpec) -> DraftHeadCheckpoint:
    """A head without files, for measurements: one layer of the model's shape, and a fourth of its tokens."""
    number = target.num_layers
    spec = DraftHeadSpec(
        layer=replace(
            target,
            family="eagle3",
            num_layers=1,
            vocab_size=-(-target.vocab_size // 4),
            tied_embeddings=False,
            windows=(),
            qk_norm=False,
        ),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        captured_layers=(min(2, number - 1), number // 2, max(number - 3, 0)),
        norm_before_residual=False,
        own_embedding=False,
        maps_tokens=True,
    )
    return DraftHeadCheckpoint(Path(DUMMY_HEAD), spec, {})


def open_mtp_layer(checkpoint: Checkpoint, name: str, speculative: str) -> DraftHeadCheckpoint:
    """The multi-token-prediction layer among a model's own tensors."""
    spec = checkpoint.spec
    prefix = BY_NAME[spec.family].mtp_layers
    stored = {each: tensor for each, tensor in checkpoint.tensors.items() if prefix and each.startswith(prefix)}
    numbers = {each.removeprefix(prefix).split(".")[0] for each in stored}
    if not numbers:
        holds = f"holds no tensors {prefix}*" if prefix else f"is a {spec.family}"
        raise ConfigError(
            f"speculative is {speculative}, and {name} {holds}: it has no multi-token-prediction layer. Such layers "
            f"are read from safetensors of {_WITH_LAYERS}. Use --speculative auto.",
            param="speculative",
        )
    if numbers != {"0"}:
        raise UnsupportedModel(
            f"{checkpoint.path} has {len(numbers)} multi-token-prediction layers ({prefix}*, numbered "
            f"{', '.join(sorted(numbers))}); quire reads models with one, number 0. Use --speculative auto."
        )
    head = DraftHeadSpec(
        layer=replace(spec, num_layers=1, tied_embeddings=False, windows=()),
        target_hidden_size=spec.hidden_size,
        target_vocab_size=spec.vocab_size,
        captured_layers=(spec.num_layers,),
        own_head=False,
        source="mtp",
    )
    own = {each.removeprefix(f"{prefix}0."): tensor for each, tensor in stored.items()}
    _check_tensors(f"{checkpoint.path} ({prefix}0)", head, own)
    return DraftHeadCheckpoint(checkpoint.path, head, own)


def _check_kind(config: JsonFields) -> None:
    names = config.texts("architectures") if config.has("architectures") else ()
    name = names[0] if names else "model of no named architecture"
    if name in _ARCHITECTURES or (name == "LlamaForCausalLM" and config.has("draft_vocab_size")):
        return
    if any(word in name for word in _PREDICTS_TOKENS):
        raise UnsupportedModel(
            f"{config.source} is a {name}: multi-token-prediction layers, which quire reads from the files of a model, "
            f"and only of {_WITH_LAYERS}. Use an EAGLE-3 head of the model, or --speculative auto."
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


def head_shapes(spec: DraftHeadSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor that a head must have, by its name, and its shape."""
    layer, hidden, names = spec.layer, spec.layer.hidden_size, HEAD_NAMES[spec.source]
    queries, keys = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
    read = hidden if names.join else 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        names.token_norm: (hidden,),
        names.state_norm: (hidden,),
        names.fuse: (hidden, len(spec.captured_layers) * spec.target_hidden_size),
        names.join: (hidden, 2 * hidden),
        names.final_norm: (hidden,),
        names.head: (layer.vocab_size, hidden),
    }
    inside: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, read),
        "self_attn.k_proj.weight": (keys, read),
        "self_attn.v_proj.weight": (keys, read),
        "self_attn.o_proj.weight": (hidden, queries),
        "mlp.gate_proj.weight": (layer.ffn_size, hidden),
        "mlp.up_proj.weight": (layer.ffn_size, hidden),
        "mlp.down_proj.weight": (hidden, layer.ffn_size),
    }
    if layer.qkv_bias:
        widths = {"q": queries, "k": keys, "v": keys}
        inside |= {f"self_attn.{part}_proj.bias": (width,) for part, width in widths.items()}
    if layer.output_bias:
        inside["self_attn.o_proj.bias"] = (hidden,)
    shapes = {name: shape for name, shape in shapes.items() if name}
    shapes |= {names.layer + name: shape for name, shape in inside.items()}
    if spec.own_embedding or hidden != spec.target_hidden_size:
        shapes["embed_tokens.weight"] = (spec.target_vocab_size, hidden)
    if layer.vocab_size != spec.target_vocab_size or spec.maps_tokens:
        shapes["d2t"] = (layer.vocab_size,)
    return shapes


def _check_tensors(place: str, spec: DraftHeadSpec, stored: Mapping[str, StoredTensor]) -> None:
    shapes = head_shapes(spec)
    missing = sorted(name for name in shapes if name not in stored)
    left_over = sorted(name for name in stored if name not in shapes and name != "t2d")
    title = HEAD_NAMES[spec.source].title
    lacks, holds = f"lacks tensors that {title} needs", f"holds tensors that {title} does not have"
    for names, words in ((missing, lacks), (left_over, holds)):
        if names:
            raise BrokenModelFile(f"{place} {words}: {', '.join(names[:4])}{' and more' if len(names) > 4 else ''}.")
    for name, shape in shapes.items():
        tensor, readable = stored[name], _INTEGERS if name == "d2t" else _FLOATS
        if tensor.shape != shape:
            raise BrokenModelFile(
                f"Tensor {tensor.name} in {tensor.path} has the shape {tensor.shape}, but the configurations of the "
                f"head and the model require {shape}."
            )
        if tensor.encoding not in readable:
            raise UnsupportedModel(
                f"Tensor {tensor.name} in {tensor.path} is stored as {tensor.encoding}, which quire does not read "
                f"there; it reads {', '.join(readable)}."
            )
