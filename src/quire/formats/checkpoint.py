"""An opened checkpoint: model spec and tensor locations, the same for a folder and a GGUF file.

An impossible spec is refused before memory is allocated for it. Does not depend on the layout of the files or the
encoding of a tensor.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from quire.core.errors import BrokenModelFile
from quire.core.model import ModelSpec, RopeKind, RopeSpec

MAX_LAYERS = 4096  # far above any model; keeps a damaged count from filling memory
MetadataValue = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]


class CheckpointSource(Enum):
    """The format of a model; it decides the names of tensors and the place of the tokenizer."""

    FOLDER = "huggingface"  # the tokenizer is tokenizer.json and the files beside it, in `path`
    GGUF = "gguf"  # the tokenizer is in `metadata`
    DUMMY = "dummy"  # random weights at a real shape: no files, no tokenizer


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor's bytes in a file. The extent was checked against the file's size."""

    name: str
    shape: tuple[int, ...]  # rows first, as torch writes it
    encoding: str  # F32, F16, BF16, Q4_1, …: safetensors' and ggml's names agree where they overlap
    path: Path
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The model's generation config; None where it sets nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def possible_tokens(ids: Iterable[int], vocab_size: int) -> tuple[int, ...]:
    """Each id once, without ids beyond the vocabulary, which are never sampled."""
    return tuple(token for token in dict.fromkeys(ids) if token < vocab_size)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything about a model except its weights."""

    source: CheckpointSource
    path: Path  # the folder or the file; for a dummy, its name
    spec: ModelSpec
    end_ids: tuple[int, ...] = ()
    defaults: GenerationDefaults = GenerationDefaults()
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    metadata: Mapping[str, MetadataValue] = field(default_factory=dict)  # GGUF only

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def encoding_bytes(self) -> dict[str, int]:
        """The bytes of the tensors by encoding, most bytes first."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            sizes[tensor.encoding] = sizes.get(tensor.encoding, 0) + tensor.num_bytes
        return dict(sorted(sizes.items(), key=lambda each: -each[1]))


def check_geometry(spec: ModelSpec, source: str) -> ModelSpec:
    """The spec, if its numbers are consistent."""
    if spec.vocab_size < 1:
        raise BrokenModelFile(f"{source} describes a model with an empty vocabulary.")
    if spec.max_positions < 2:
        raise BrokenModelFile(
            f"{source} describes a model for {spec.max_positions} positions; a prompt and its answer take 2 at least."
        )
    if spec.head_dim % 2:
        raise BrokenModelFile(f"{source} describes heads of {spec.head_dim} dimensions; the number must be even.")
    if spec.num_heads % spec.num_kv_heads:
        raise BrokenModelFile(
            f"{source} describes {spec.num_heads} attention heads over {spec.num_kv_heads} key/value heads, "
            f"which do not divide evenly."
        )
    for rope in (spec.rope, spec.local_rope):
        if rope is not None:
            _check_rope(rope, spec.head_dim, source)
    return spec


def _check_rope(rope: RopeSpec, head_dim: int, source: str) -> None:
    if rope.rotary_dim % 2 or not 0 < rope.rotary_dim <= head_dim:
        raise BrokenModelFile(
            f"{source} has rotary_dim {rope.rotary_dim} with head_dim {head_dim}; "
            f"it must be an even number from 2 to {head_dim}."
        )
    for factors in (rope.short_factors, rope.long_factors):
        if factors and (len(factors) != rope.rotary_dim // 2 or min(factors) <= 0):
            raise BrokenModelFile(
                f"{source} has {len(factors)} rope factors, the smallest {min(factors):g}; "
                f"{rope.rotary_dim // 2} above 0 are needed."
            )
    _check_scaling(rope, source)


def _check_scaling(rope: RopeSpec, source: str) -> None:
    """The divisors and logarithms of rope scalings."""
    if rope.kind is RopeKind.LLAMA3 and rope.high_freq_factor <= rope.low_freq_factor:
        raise BrokenModelFile(
            f"{source} has rope scaling from low_freq_factor {rope.low_freq_factor:g} to high_freq_factor "
            f"{rope.high_freq_factor:g}; the second must be the larger one."
        )
    if rope.kind is RopeKind.YARN and (min(rope.beta_fast, rope.beta_slow) <= 0 or rope.theta <= 1):
        raise BrokenModelFile(
            f"{source} has YaRN rope scaling with beta_fast {rope.beta_fast:g}, beta_slow {rope.beta_slow:g} and base "
            f"{rope.theta:g}; the first two must be above 0, the base above 1."
        )
    if rope.kind is RopeKind.LONGROPE and rope.original_max_positions < 2:
        raise BrokenModelFile(
            f"{source} has longrope scaling from {rope.original_max_positions} original positions; 2 are the least."
        )
