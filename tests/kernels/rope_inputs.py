"""Builds what `rope_and_write_kv` works on: heads, a norm, a rotation, and a store full of NaN."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.kernels.interface import HeadNorm, Kernels, Rotation, StepLayout
from tests.kernels.layouts import Pages, Part

HEADS, KV_HEADS = 4, 2
LAYER, NUM_LAYERS = 1, 3
BLOCK_SIZE = 4


class Parted(NamedTuple):
    """One buffer's heads."""

    query: Tensor  # [tokens, heads, dim]
    key: Tensor  # [tokens, kv_heads, dim]
    value: Tensor  # [tokens, kv_heads, dim]


class Turned(NamedTuple):
    """What `rope_and_write_kv` left behind."""

    query: Tensor  # [tokens, heads, dim]
    store: Tensor  # [blocks, layers, 2, block_size, kv_heads, dim]


class Turning(NamedTuple):
    """One step's input, of several sequences."""

    layout: StepLayout
    qkv: Tensor  # [tokens, heads + 2 * kv_heads, dim]
    head_norm: HeadNorm | None
    rotation: Rotation
    store: Tensor  # [blocks, layers, 2, block_size, kv_heads, dim], NaN everywhere

    @staticmethod
    def drawn(
        dtype: torch.dtype,
        *,
        rotary_dim: int,
        has_norm: bool,
        dim: int = 32,
        stored: torch.dtype | None = None,
        device: str = "cpu",
    ) -> "Turning":
        generator = torch.Generator().manual_seed(dim + rotary_dim)
        pages = Pages.shuffled([10, 3, 7], BLOCK_SIZE, seed=1)
        layout = pages.layout({0: Part(7, 3), 1: Part(2, 1), 2: Part(0, 1)}, device)
        num_tokens = len(layout.slots)
        qkv = torch.randn(num_tokens, HEADS + 2 * KV_HEADS, dim, generator=generator)
        weight = torch.randn(HEADS + KV_HEADS, dim, generator=generator)
        cos, sin = torch.randn(2, num_tokens, 1, rotary_dim, generator=generator).to(device, dtype)
        shape = (pages.num_blocks, NUM_LAYERS, 2, BLOCK_SIZE, KV_HEADS, dim)
        return Turning(
            layout=layout,
            qkv=qkv.to(device, dtype),
            head_norm=HeadNorm(weight.to(device), 1e-5) if has_norm else None,
            rotation=Rotation(cos, sin),
            store=torch.full(shape, math.nan, dtype=stored or dtype, device=device),
        )

    def through(self, kernels: Kernels) -> Turned:
        """On copies."""
        qkv, store = self.qkv.clone(), self.store.clone()
        step = kernels.plan(self.layout, BLOCK_SIZE)
        step.rope_and_write_kv(qkv, self.head_norm, self.rotation, store[:, LAYER])
        return Turned(heads_apart(qkv).query, store)

    def written(self, store: Tensor) -> Tensor:
        """What lies in the step's slots: [tokens, 2, kv_heads, dim]."""
        return store[:, LAYER].transpose(1, 2).flatten(0, 1)[self.layout.slots]


def heads_apart(qkv: Tensor) -> Parted:
    return Parted(*qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1))
