"""Allocates a decoder's weights, and fills dummy weights. Does not depend on files.

Dummy weights are deterministic and are made at the speed of a memory copy.
"""

from collections.abc import Callable
from dataclasses import fields
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.model import ModelSpec
from quire.core.sharding import WHOLE, Shard
from quire.models.parameters import DecoderWeights, LayerWeights, as_tensor, layer_shapes
from quire.weights.names import FusedPart
from quire.weights.sharding import shard_pieces

LAYER_FIELDS = tuple(field.name for field in fields(LayerWeights))


class UnfilledWeights(NamedTuple):
    """Allocated weights, and the function that fills them, to be called once. Until then the contents are undefined."""

    weights: DecoderWeights
    fill: Callable[[], None]

    def filled(self) -> DecoderWeights:
        self.fill()
        return self.weights


def empty_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, shard: Shard = WHOLE
) -> DecoderWeights:
    """Every tensor of the model, or of a rank's part of it: matrices in a dtype, norms in float32."""
    try:
        return _allocate(spec, dtype, device, shard)
    except RuntimeError as error:  # torch's allocators raise this, and torch.OutOfMemoryError is one
        gibibytes = num_parameters(spec) * dtype.itemsize / 2**30
        raise ConfigError(
            f"Not enough memory on {device} for the model's weights: they take {gibibytes:.1f} GiB. "
            f"Use a smaller model, a narrower dtype or another device."
        ) from error


def num_parameters(spec: ModelSpec) -> int:
    layer = sum(prod(shape) for shape in layer_shapes(spec).values())
    tables = 1 if spec.tied_embeddings else 2
    return spec.num_layers * layer + spec.hidden_size * (1 + tables * spec.vocab_size)


def is_norm(field: str) -> bool:
    return field.endswith("_norm")


def _allocate(spec: ModelSpec, dtype: torch.dtype, device: torch.device | str, shard: Shard) -> DecoderWeights:
    num_rows, part = len(shard.vocabulary(spec)), shard.spec(spec)
    embedding = torch.empty(num_rows if shard.is_first else 0, spec.hidden_size, dtype=dtype, device=device)
    shares_table = spec.tied_embeddings and shard.num_stages == 1
    head = embedding if shares_table else embedding.new_empty(num_rows if shard.is_last else 0, spec.hidden_size)
    final_norm = torch.empty(spec.hidden_size if shard.is_last else 0, dtype=torch.float32, device=device)
    layers = tuple(_allocate_layer(part, dtype, device) for _ in range(part.num_layers))
    return DecoderWeights(embedding, layers, final_norm, head)


def _allocate_layer(spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> LayerWeights:
    tensors: dict[str, Tensor | None] = dict.fromkeys(LAYER_FIELDS)
    for name, shape in layer_shapes(spec).items():
        tensors[name] = torch.empty(shape, dtype=torch.float32 if is_norm(name) else dtype, device=device)
    return LayerWeights(**tensors)  # type: ignore[arg-type]  # layer_shapes names all that is not optional


# Random values are drawn once and repeated. A prime: no row length divides it, so rows differ.
NUM_DRAWN = 1_000_003
DEVIATION = 0.02  # what transformers initializes with; keeps activations finite at any depth


def dummy_weights(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, shard: Shard = WHOLE
) -> UnfilledWeights:
    """Dummy weights that depend only on the shape, the dtype and the seed. Norms are ones. A rank has its part of the
    values of the whole model."""
    weights = empty_weights(spec, dtype, device, shard)
    shapes = layer_shapes(spec) | dict.fromkeys(("embedding", "head"), (spec.vocab_size, spec.hidden_size))

    def fill_field(name: str, tensor: Tensor | None, drawn: Tensor, start: int) -> int:
        if tensor is None:  # of another pipeline stage
            return (start + prod(shapes[name])) % len(drawn)
        if shard.size == 1:
            return _fill(tensor, drawn, start)
        whole = torch.empty(shapes[name], dtype=dtype, device=device)
        following = _fill(whole, drawn, start)
        for stored, target, columns in shard_pieces(spec, shard, name, FusedPart.WHOLE, len(whole)):
            values = whole[stored.start : stored.stop]
            tensor[target.start : target.stop] = values if columns is None else values[:, columns.start : columns.stop]
        return following

    def fill() -> None:
        generator = torch.Generator().manual_seed(seed)
        drawn = (torch.randn(NUM_DRAWN, generator=generator) * DEVIATION).to(dtype=dtype, device=device)
        weights.final_norm.fill_(1.0)
        head = as_tensor(weights.head) if shard.is_last else None
        copied = head if spec.tied_embeddings else None  # in the last of several stages
        start = fill_field("embedding", as_tensor(weights.embedding) if shard.is_first else copied, drawn, 0)
        if not spec.tied_embeddings:
            start = fill_field("head", head, drawn, start)
        held = dict(zip(shard.layers(spec), weights.layers, strict=True))
        for index in range(spec.num_layers):
            for name in [name for name in LAYER_FIELDS if name in shapes]:
                tensor = getattr(held[index], name) if index in held else None
                if not is_norm(name):
                    start = fill_field(name, tensor, drawn, start)
                elif tensor is not None:
                    tensor.fill_(1.0)

    return UnfilledWeights(weights, fill)


def _fill(tensor: Tensor, drawn: Tensor, start: int) -> int:
    """Fill a tensor with the drawn values from `start` on; returns where the next tensor starts."""
    flat = tensor.view(-1)
    place = 0
    while place < len(flat):
        count = min(len(drawn) - start, len(flat) - place)
        flat[place : place + count] = drawn[start : start + count]
        place += count
        start = (start + count) % len(drawn)
    return start
