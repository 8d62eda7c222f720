"""Fills a decoder's weights from an opened checkpoint, after checking that it holds exactly what it must.

Queries, keys and values become one matrix, gate and up another; norms become float32 factors.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import BrokenModelFile
from quire.formats.checkpoint import Checkpoint, CheckpointSource
from quire.formats.families import BY_NAME
from quire.models.parameters import DecoderWeights
from quire.weights.allocate import UnfilledWeights, empty_weights, is_norm
from quire.weights.dequantize import Dequantizer, FloatsOnly, refuse_unreadable
from quire.weights.loader_threads import carry
from quire.weights.names import FusedPart, WeightTarget, expected_tensors, is_ignorable
from quire.weights.tensor_reader import pieces_of

NAMES_SHOWN = 4

Progress = Callable[[int, int], None]  # bytes read so far, bytes in all


def room_for(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    unpacker: Dequantizer | None = None,
) -> UnfilledWeights:
    """Fresh memory on a device, to be filled with every tensor of a checkpoint; what that lacks, or has too much of, is
    refused now. Packed tensors need an unpacker."""
    unpacker = unpacker or FloatsOnly()
    targets = _match(checkpoint, unpacker)
    weights = empty_weights(checkpoint.spec, dtype, device)
    destinations = {name: _field(weights, target)[target.rows.start : target.rows.stop]
                    for name, target in targets.items()}  # fmt: skip

    def fill() -> None:
        in_order = sorted(targets, key=lambda name: _place_in_files(checkpoint, name))
        pieces = [piece for name in in_order for piece in pieces_of(checkpoint.tensors[name], destinations[name])]
        carry(pieces, unpacker, torch.device(device), _LoadProgress(sum(piece.num_bytes for piece in pieces), progress))
        for name, target in targets.items():
            _convert(destinations[name], target, checkpoint)

    return UnfilledWeights(weights, fill)


class _LoadProgress:
    """Adds up what was read, and tells of it in a hundred steps or fewer."""

    __slots__ = ("_done", "_progress", "_step", "_told", "_total")

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._progress = progress
        self._total = total
        self._step = -(-total // 100)
        self._done = self._told = 0

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None and (self._done - self._told >= self._step or self._done == self._total):
            self._told = self._done
            self._progress(self._done, self._total)


def _field(weights: DecoderWeights, target: WeightTarget) -> Tensor:
    owner = weights if target.layer is None else weights.layers[target.layer]
    tensor = getattr(owner, target.field)
    assert isinstance(tensor, Tensor), target
    return tensor


class _TensorPlace(NamedTuple):
    """The order in which a disk likes to be read."""

    path: Path
    offset: int


def _place_in_files(checkpoint: Checkpoint, name: str) -> _TensorPlace:
    stored = checkpoint.tensors[name]
    return _TensorPlace(stored.path, stored.offset)


def _convert(values: Tensor, target: WeightTarget, checkpoint: Checkpoint) -> None:
    """Undo, in place, what a format does to some tensors."""
    family = BY_NAME[checkpoint.spec.family]
    if checkpoint.source is CheckpointSource.FOLDER and family.gemma and is_norm(target.field):
        values += 1.0  # Gemma stores its norms less one; llama.cpp's converter has added it already
    interleaved = checkpoint.source is CheckpointSource.GGUF and family.interleaved_in_gguf
    if interleaved and target.part in (FusedPart.QUERY, FusedPart.KEY):
        pairs = values.view(-1, checkpoint.spec.head_dim // 2, 2, *values.shape[1:])
        values.copy_(pairs.transpose(1, 2).reshape(values.shape))


def _match(checkpoint: Checkpoint, unpacker: Dequantizer) -> dict[str, WeightTarget]:
    """The tensors to read, by stored name; an error names those that are missing, left over or misshapen."""
    spec, source, stored = checkpoint.spec, checkpoint.source, checkpoint.tensors
    targets = expected_tensors(spec, source)
    missing = [name for name in targets if name not in stored]
    if missing:
        raise BrokenModelFile(
            f"{checkpoint.path} lacks {len(missing)} of the {len(targets)} tensors that a {spec.family} of "
            f"{spec.num_layers} layers needs: {_listed(missing)}."
        )
    left_over = [name for name in stored if name not in targets and not is_ignorable(name, spec, source)]
    if left_over:
        raise BrokenModelFile(
            f"{checkpoint.path} holds {len(left_over)} tensors that a {spec.family} of {spec.num_layers} "
            f"layers does not have: {_listed(left_over)}."
        )
    for name, target in targets.items():
        if stored[name].shape != target.shape:
            raise BrokenModelFile(
                f"Tensor {name} in {stored[name].path} has the shape {stored[name].shape}, "
                f"but the model's description asks for {target.shape}."
            )
    refuse_unreadable((stored[name] for name in targets), unpacker)
    return targets


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
    return ", ".join(ordered[:NAMES_SHOWN]) + more
