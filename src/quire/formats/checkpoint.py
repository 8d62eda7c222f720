"""An opened checkpoint: model spec and tensor locations, the same for a folder and a GGUF file.

Does not depend on the layout of the files or the encoding of a tensor.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from quire.core.model import ModelSpec

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
