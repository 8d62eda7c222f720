"""Fills a decoder's weights from an opened checkpoint, after checking that it has exactly the expected tensors.

Queries, keys and values become one matrix, gate and up another; norms become float32 factors.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from quire.core.errors import BrokenModelFile
from quire.core.sharding import WHOLE, Shard
from quire.formats.checkpoint import Checkpoint, CheckpointSource, StoredTensor
from quire.formats.families import BY_NAME
from quire.models.parameters import DecoderWeights
from quire.weights.allocate import UnfilledWeights, empty_weights, is_norm
from quire.weights.dequantize import Dequantizer, FloatsOnly, refuse_unreadable
from quire.weights.loader_threads import load_slices
from quire.weights.names import FusedPart, WeightTarget, expected_tensors, is_ignorable
from quire.weights.sharding import ShardSlice, shard_pieces, stage_targets
from quire.weights.tensor_reader import slices_of

NAMES_SHOWN = 4

Progress = Callable[[int, int], None]  # bytes read so far, total bytes


def unfilled_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    dequantizer: Dequantizer | None = None,
    shard: Shard = WHOLE,
) -> UnfilledWeights:
    """Allocate weights on a device, to be filled from a checkpoint. Missing and surplus tensors are refused now.
    Quantized tensors need a dequantizer. With a shard, only that rank's part is allocated and kept."""
    dequantizer = dequantizer or FloatsOnly()
    targets = stage_targets(checkpoint.spec, shard, match_tensors(checkpoint, dequantizer))
    weights = empty_weights(checkpoint.spec, dtype, device, shard)
    pieces = {name: shard_pieces(checkpoint.spec, shard, target.field, target.part, target.shape[0])
              for name, target in targets.items()}  # fmt: skip

    def destination(name: str, piece: ShardSlice) -> Tensor:
        return _field(weights, targets[name])[piece.target.start : piece.target.stop]

    def fill() -> None:
        stored = sorted(((checkpoint.tensors[name], name) for name in targets), key=lambda each: _place(each[0]))
        slices = [
            part
            for tensor, name in stored
            for piece in pieces[name]
            for part in slices_of(tensor, destination(name, piece), piece.stored.start, piece.columns)
        ]
        load_slices(
            slices,
            dequantizer,
            torch.device(device),
            LoadedBytes(sum(tensor_slice.num_bytes for tensor_slice in slices), progress),
        )
        for name, target in targets.items():
            for piece in pieces[name]:
                _convert(destination(name, piece), target, checkpoint)

    return UnfilledWeights(weights, fill)


class LoadedBytes:
    """Sums the bytes read, and reports them in at most 100 steps."""

    __slots__ = ("_done", "_progress", "_reported", "_step", "_total")

    def __init__(self, total: int, progress: Progress | None) -> None:
        self._progress = progress
        self._total = total
        self._step = -(-total // 100)
        self._done = self._reported = 0

    def __call__(self, num_bytes: int) -> None:
        self._done += num_bytes
        if self._progress is not None and (self._done - self._reported >= self._step or self._done == self._total):
            self._reported = self._done
            self._progress(self._done, self._total)


def _field(weights: DecoderWeights, target: WeightTarget) -> Tensor:
    owner = weights if target.layer is None else weights.layers[target.layer]
    tensor = getattr(owner, target.field)
    assert isinstance(tensor, Tensor), target
    return tensor


def _place(stored: StoredTensor) -> tuple[Path, int]:
    """Sort key for sequential disk reads."""
    return stored.path, stored.offset


def _convert(values: Tensor, target: WeightTarget, checkpoint: Checkpoint) -> None:
    """Undo, in place, what a format does to some tensors."""
    family = BY_NAME[checkpoint.spec.family]
    if checkpoint.source is CheckpointSource.FOLDER and family.gemma and is_norm(target.field):
        values += 1.0  # Gemma stores its norms less one; llama.cpp's converter has added it already
    if is_interleaved(checkpoint) and target.part in (FusedPart.QUERY, FusedPart.KEY):
        pairs = values.view(-1, checkpoint.spec.head_dim // 2, 2, *values.shape[1:])
        values.copy_(pairs.transpose(1, 2).reshape(values.shape))


def is_interleaved(checkpoint: Checkpoint) -> bool:
    """Whether the two halves of each head's queries and keys are stored alternately, as llama.cpp does."""
    return checkpoint.source is CheckpointSource.GGUF and BY_NAME[checkpoint.spec.family].interleaved_in_gguf


def match_tensors(checkpoint: Checkpoint, dequantizer: Dequantizer) -> dict[str, WeightTarget]:
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
                f"but the model's configuration requires {target.shape}."
            )
    refuse_unreadable((stored[name] for name in targets), dequantizer)
    return targets


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - NAMES_SHOWN} more" if len(ordered) > NAMES_SHOWN else ""
    return ", ".join(ordered[:NAMES_SHOWN]) + more
