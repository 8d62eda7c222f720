"""Opens a model folder of Hugging Face: config.json, generation_config.json, headers of safetensors files.

Refuses quantized checkpoints, adapters and pickled weights by name. Runs no code. Never reads the bytes of tensors.

A safetensors file is eight bytes of length, a JSON header, then data. The header is read here rather than by the
safetensors package because the loader needs offsets: with them, both formats become one `StoredTensor`.
"""

import json
import math
from pathlib import Path
from typing import TypeGuard

from quire.core.errors import BrokenModelFile, ModelNotFound, UnsupportedModel
from quire.formats.checkpoint import Checkpoint, CheckpointSource, GenerationDefaults, StoredTensor, possible_tokens
from quire.formats.hf_config import read_spec
from quire.formats.json_fields import JsonFields

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
MAX_DIMENSION = 2**48
LENGTH_BYTES = 8

ITEM_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8,
    "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
}  # fmt: skip


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one file, by name. Their extents lie inside the file."""
    try:
        file_size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(LENGTH_BYTES)
            header_size = int.from_bytes(prefix, "little")
            if len(prefix) < LENGTH_BYTES or header_size > min(file_size - LENGTH_BYTES, MAX_HEADER_BYTES):
                raise BrokenModelFile(
                    f"{path} is not a complete safetensors file: it has {file_size} bytes, and its header "
                    f"claims {header_size}. Fetch it again."
                )
            header = json.loads(file.read(header_size))
    except (ValueError, RecursionError) as error:
        raise BrokenModelFile(
            f"The header of {path} ({header_size} of {file_size} bytes) is damaged: {error}. Fetch it again."
        ) from error
    if not isinstance(header, dict):
        raise BrokenModelFile(f"The header of {path} is not a mapping of tensors. Fetch the file again.")
    header.pop("__metadata__", None)
    data_start = LENGTH_BYTES + header_size
    return {name: _stored(path, name, entry, data_start, file_size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: object, data_start: int, file_size: int) -> StoredTensor:
    if not isinstance(entry, dict):
        raise BrokenModelFile(f"The entry of tensor {name} in {path} is damaged. Fetch the file again.")
    encoding, shape, extent = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(encoding, str) or not _are_sizes(shape) or not _are_sizes(extent) or len(extent) != 2:
        raise BrokenModelFile(f"The entry of tensor {name} in {path} is damaged. Fetch the file again.")
    begin, end = extent
    if data_start + end > file_size or begin > end:
        raise BrokenModelFile(
            f"{path} is truncated: it has {file_size} bytes, but tensor {name} ends at byte "
            f"{data_start + end}. Fetch it again."
        )
    bits = ITEM_BITS.get(encoding)
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise BrokenModelFile(
            f"Tensor {name} in {path} is {encoding} of shape {tuple(shape)}, which is "
            f"{math.prod(shape) * bits // 8} bytes, but the header gives it {end - begin}."
        )
    return StoredTensor(name, tuple(shape), encoding, path, data_start + begin, end - begin)


def _are_sizes(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DIMENSION for value in values
    )


CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADAPTER_CONFIG = "adapter_config.json"
SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")


def open_folder(folder: Path) -> Checkpoint:
    """Everything about the model in a folder except its weights."""
    _refuse_adapter(folder)
    if not (folder / CONFIG).is_file():
        raise ModelNotFound(f"{folder} has no {CONFIG}, so it is not a model folder.")
    config = read_json(folder / CONFIG)
    refuse_quantized(config)
    spec = read_spec(config)
    generation = JsonFields({}, GENERATION_CONFIG)
    if (folder / GENERATION_CONFIG).is_file():
        generation = read_json(folder / GENERATION_CONFIG)
    return Checkpoint(
        source=CheckpointSource.FOLDER,
        path=folder,
        spec=spec,
        end_ids=possible_tokens(
            generation.token_ids("eos_token_id") or config.token_ids("eos_token_id"), spec.vocab_size
        ),
        defaults=_generation_defaults(generation),
        tensors=index_tensors(folder),
    )


def read_json(path: Path) -> JsonFields:
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        size = path.stat().st_size
        raise BrokenModelFile(f"{path} ({size} bytes) is not valid JSON: {error}. Fetch it again.") from error
    if not isinstance(values, dict):
        raise BrokenModelFile(f"{path} is not a JSON object. Fetch it again.")
    return JsonFields(values, str(path))


def _refuse_adapter(folder: Path) -> None:
    path = folder / ADAPTER_CONFIG
    if not path.is_file():
        return
    adapter = read_json(path)
    kind = adapter.text("peft_type", "unnamed")
    base = adapter.text("base_model_name_or_path", "a base model it does not name")
    raise UnsupportedModel(
        f"{folder} holds an adapter ({kind}) for {base}, and quire does not read adapters yet. "
        f"Merge it into its base model and save that, or load only the base model."
    )


def refuse_quantized(config: JsonFields) -> None:
    for key in ("quantization_config", "compression_config"):
        if config.has(key):
            method = config.mapping(key).text("quant_method", "an unnamed method")
            raise UnsupportedModel(
                f"{config.source} is of a checkpoint quantized with {method}, which quire does not read yet. "
                f"Use the model's unquantized safetensors, or a GGUF file of it."
            )


def _generation_defaults(generation: JsonFields) -> GenerationDefaults:
    """Temperature, top_p and top_k count only if the generation config has do_sample."""
    penalty = generation.optional_number("repetition_penalty")
    if not generation.flag("do_sample", False):
        return GenerationDefaults(repetition_penalty=penalty)
    return GenerationDefaults(
        temperature=generation.optional_number("temperature"),
        top_p=generation.optional_number("top_p"),
        top_k=generation.optional_integer("top_k", low=-1),  # -1: all tokens, as vLLM writes it
        min_p=generation.optional_number("min_p"),
        repetition_penalty=penalty,
    )


def index_tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / SINGLE_FILE).is_file():
        return read_safetensors(folder / SINGLE_FILE)
    if (folder / INDEX_FILE).is_file():
        return _read_shards(folder)
    pickled = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLED_SUFFIXES)
    if pickled:
        raise UnsupportedModel(
            f"{folder} has its weights only as {pickled[0]}, which can run code when it is opened, so quire "
            f"does not read it. Convert the model to safetensors (transformers' save_pretrained does)."
        )
    raise ModelNotFound(f"{folder} holds neither {SINGLE_FILE} nor {INDEX_FILE}, so there are no weights to load.")


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    """The union of the shards, which must hold every tensor in the index."""
    weight_map = read_json(folder / INDEX_FILE).mapping("weight_map")
    shard_of = {name: weight_map.text(name) for name in weight_map}
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        path = folder / shard
        if Path(shard).name != shard or not path.is_file():
            raise BrokenModelFile(f"{folder / INDEX_FILE} names the shard {shard!r}, which is not there. Fetch it.")
        for name, stored in read_safetensors(path).items():
            if name in tensors:
                raise BrokenModelFile(f"Tensor {name} lies both in {tensors[name].path.name} and in {shard}.")
            tensors[name] = stored
    lost = [name for name, shard in shard_of.items() if name not in tensors or tensors[name].path.name != shard]
    if lost:
        raise BrokenModelFile(
            f"{folder / INDEX_FILE} lists {len(lost)} tensors that are missing from its shards, "
            f"first {lost[0]} in {shard_of[lost[0]]}. Fetch the shards again."
        )
    return tensors
