"""Invented weights at a real shape: deterministic, and made at the speed of copying memory."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.model import ModelSpec
from quire.models.parameters import LayerWeights
from quire.weights.allocate import LAYER_FIELDS, Room, empty_weights, is_norm

# Random values are drawn once and laid end to end. A prime: no row length divides it, so rows differ.
NUM_DRAWN = 1_000_003
DEVIATION = 0.02  # what transformers initializes with; keeps activations finite at any depth


def dummy_room(spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0) -> Room:
    """To be filled with weights that depend only on the shape, the dtype and the seed. Norms are ones."""
    weights = empty_weights(spec, dtype, device)

    def fill() -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(NUM_DRAWN, generator=generator) * DEVIATION).to(dtype=dtype, device=device)
        weights.final_norm.fill_(1.0)
        start = _fill(weights.embedding, drawn, 0)
        if not spec.tied_embeddings:
            start = _fill(weights.head, drawn, start)
        for layer in weights.layers:
            for name, tensor in _tensors(layer):
                if is_norm(name):
                    tensor.fill_(1.0)
                else:
                    start = _fill(tensor, drawn, start)

    return Room(weights, fill)


class _Named(NamedTuple):
    name: str
    tensor: Tensor


def _tensors(layer: LayerWeights) -> Iterator[_Named]:
    for name in LAYER_FIELDS:
        tensor = getattr(layer, name)
        if tensor is not None:
            yield _Named(name, tensor)


def _fill(tensor: Tensor, drawn: Tensor, start: int) -> int:
    """Lay the drawn values into a tensor from one of them on; gives the one to begin the next tensor with."""
    flat = tensor.view(-1)
    place = 0
    while place < len(flat):
        count = min(len(drawn) - start, len(flat) - place)
        flat[place : place + count] = drawn[start : start + count]
        place += count
        start = (start + count) % len(drawn)
    return start
