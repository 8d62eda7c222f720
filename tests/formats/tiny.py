"""Tiny random models of every family, as folders that transformers wrote and as GGUF files."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType

HIDDEN, FFN, LAYERS, HEADS, KV_HEADS, VOCAB, CONTEXT = 64, 96, 4, 4, 2, 80, 256

CONFIGS = {
    "llama": transformers.LlamaConfig,
    "mistral": transformers.MistralConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
}
OWN_CHOICES: dict[str, dict[str, object]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 24},
    "qwen2": {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 3},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "gemma2": {"head_dim": 32, "sliding_window": 12, "query_pre_attn_scalar": 24},
    "gemma3": {
        "head_dim": 32,
        "sliding_window": 12,
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 3,
    },
    "phi3": {"pad_token_id": 0, "partial_rotary_factor": 0.5, "sliding_window": 30},
}
FAMILY_NAMES = tuple(CONFIGS)


def tiny_config(family: str, **changes: object) -> transformers.PretrainedConfig:
    sizes = {
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
    }
    return CONFIGS[family](**{**sizes, **OWN_CHOICES[family], **changes})


def tiny_model(family: str, **changes: object) -> transformers.PreTrainedModel:
    """Every parameter random, norms and biases too, so that a mistaken place or offset shows."""
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family, **changes))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def save_folder(model: transformers.PreTrainedModel, folder: Path, shard_size: str = "5GB") -> Path:
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def gguf_metadata(family: str, config: transformers.PretrainedConfig) -> dict[str, object]:
    """The keys that llama.cpp's converter writes for such a model."""
    arch = "llama" if family == "mistral" else family
    head_dim = getattr(config, "head_dim", None) or HIDDEN // HEADS
    metadata: dict[str, object] = {
        "block_count": LAYERS,
        "context_length": CONTEXT,
        "embedding_length": HIDDEN,
        "feed_forward_length": FFN,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 20_000.0,
    }
    if arch != "phi3":
        metadata |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
    if arch in ("gemma2", "gemma3", "phi3"):
        metadata["attention.sliding_window"] = 12
    if arch == "phi3":
        metadata["rope.dimension_count"] = 8
    return {f"{arch}.{key}": value for key, value in metadata.items()}


def gguf_tensors(family: str, model: transformers.PreTrainedModel) -> dict[str, np.ndarray]:
    """A state dict as llama.cpp's converter renames and rewrites it."""
    arch = next(
        key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == ("llama" if family == "mistral" else family)
    )
    names = gguf.get_tensor_name_map(arch, LAYERS)
    tied = model.config.tie_word_embeddings
    tensors = {}
    for name, value in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        array = value.float().numpy().copy()
        if family in ("llama", "mistral") and ("q_proj" in name or "k_proj" in name):
            heads = HEADS if "q_proj" in name else KV_HEADS
            array = array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        if family.startswith("gemma") and "norm" in name:
            array = array + 1.0
        tensors[names.get_name(name, try_suffixes=(".weight", ".bias"))] = array
    return tensors


def write_gguf(
    path: Path,
    arch: str,
    metadata: Mapping[str, object],
    tensors: Mapping[str, np.ndarray],
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
) -> Path:
    """A GGUF file; matrices are stored as `kind`, the rest as float32."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in metadata.items():
        _add(writer, key, value)
    for name, array in tensors.items():
        if array.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, np.ascontiguousarray(array, dtype=np.float32))
        else:
            writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(array), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        assert isinstance(value, Iterable)
        writer.add_array(key, list(value))


def tiny_gguf(path: Path, family: str, kind: GGMLQuantizationType = GGMLQuantizationType.F32, **more: object) -> Path:
    model = tiny_model(family)
    arch = "llama" if family == "mistral" else family
    metadata = gguf_metadata(family, model.config) | {key.replace("__", "."): value for key, value in more.items()}
    return write_gguf(path, arch, metadata, gguf_tensors(family, model), kind)
