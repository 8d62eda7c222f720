"""Loads the weights of a head that drafts, whose tensors were checked when it was opened."""

import numpy as np
import torch
from torch import Tensor

from quire.core.errors import BrokenModelFile
from quire.formats.draft_head import HEAD_NAMES, DraftHeadCheckpoint, head_shapes
from quire.models.draft_head import DraftHeadWeights
from quire.models.parameters import DecoderWeights, LayerWeights
from quire.weights.allocate import DEVIATION
from quire.weights.dequantize import FloatsOnly
from quire.weights.load import LoadedBytes, Progress
from quire.weights.loader_threads import load_slices
from quire.weights.tensor_reader import read_exactly, slices_of


class _HeadTensors:
    """Allocates tensors, and remembers what fills them."""

    def __init__(self, checkpoint: DraftHeadCheckpoint, dtype: torch.dtype, device: torch.device) -> None:
        self._checkpoint, self._dtype, self._device = checkpoint, dtype, device
        self._shapes = head_shapes(checkpoint.spec)
        self._parts: list[tuple[str, Tensor]] = []

    def tensor(self, *names: str, dtype: torch.dtype | None = None) -> Tensor:
        """Stored tensors one after the other, as one."""
        shapes = [self._shapes[name] for name in names]
        whole = torch.empty(
            sum(shape[0] for shape in shapes), *shapes[0][1:], dtype=dtype or self._dtype, device=self._device
        )
        self._parts.extend(zip(names, torch.split(whole, [shape[0] for shape in shapes]), strict=True))
        return whole

    def matrix(self, name: str) -> Tensor | None:
        """None: heads of this kind have none."""
        return self.tensor(name) if name else None

    def vector(self, *names: str) -> Tensor:
        return self.tensor(*names, dtype=torch.float32)

    def fill(self, progress: Progress | None) -> None:
        if not self._checkpoint.tensors:
            self._fill_dummies()
            return
        stored = [(self._checkpoint.tensors[name], destination) for name, destination in self._parts]
        slices = [part for tensor, destination in stored for part in slices_of(tensor, destination)]
        total = sum(part.num_bytes for part in slices)
        load_slices(slices, FloatsOnly(), self._device, LoadedBytes(total, progress))

    def _fill_dummies(self) -> None:
        """As those of a model: norms are ones, and the rest depends on the shapes only."""
        generator = torch.Generator().manual_seed(0)
        for _, destination in self._parts:
            if destination.dim() == 1:
                destination.fill_(1.0)
            else:
                destination.copy_(torch.randn(destination.shape, generator=generator) * DEVIATION)


def load_draft_head(
    checkpoint: DraftHeadCheckpoint, dtype: torch.dtype, device: torch.device, progress: Progress | None = None
) -> DraftHeadWeights:
    """Matrices in this dtype, norms and biases in float32."""
    tensors, spec, names = _HeadTensors(checkpoint, dtype, device), checkpoint.spec, HEAD_NAMES[checkpoint.spec.source]
    attention, mlp = f"{names.layer}self_attn.{{}}_proj.{{}}", f"{names.layer}mlp.{{}}_proj.weight"
    layer = LayerWeights(
        attention_norm=tensors.vector(f"{names.layer}input_layernorm.weight"),
        qkv=tensors.tensor(*(attention.format(part, "weight") for part in "qkv")),
        qkv_bias=tensors.vector(*(attention.format(part, "bias") for part in "qkv")) if spec.layer.qkv_bias else None,
        query_norm=None,
        key_norm=None,
        output=tensors.tensor(attention.format("o", "weight")),
        output_bias=tensors.vector(attention.format("o", "bias")) if spec.layer.output_bias else None,
        attention_post_norm=None,
        mlp_norm=tensors.vector(f"{names.layer}post_attention_layernorm.weight"),
        gate_up=tensors.tensor(mlp.format("gate"), mlp.format("up")),
        gate_up_bias=None,
        down=tensors.tensor(mlp.format("down")),
        down_bias=None,
        mlp_post_norm=None,
    )
    nothing = torch.empty(0, spec.layer.hidden_size, dtype=dtype, device=device)
    embedding = tensors.tensor("embed_tokens.weight") if spec.own_embedding else nothing
    head = tensors.tensor(names.head) if spec.own_head else nothing
    weights = DraftHeadWeights(
        fuse=tensors.matrix(names.fuse),
        hidden_norm=tensors.vector(names.state_norm),
        layer=DecoderWeights(embedding, (layer,), tensors.vector(names.final_norm), head),
        target_tokens=_target_tokens(checkpoint, device) if spec.maps_tokens else None,
        join=tensors.matrix(names.join),
        token_norm=tensors.vector(names.token_norm),
    )
    tensors.fill(progress)
    return weights


def _target_tokens(checkpoint: DraftHeadCheckpoint, device: torch.device) -> Tensor:
    """The model's token of each draft token: `d2t` has the difference."""
    vocab_size = checkpoint.spec.target_vocab_size
    if not checkpoint.tensors:
        number = checkpoint.spec.layer.vocab_size
        return torch.arange(number, device=device) * (vocab_size // number)
    stored = checkpoint.tensors["d2t"]
    differences = np.empty(stored.shape[0], dtype=np.int64 if stored.encoding == "I64" else np.int32)
    with stored.path.open("rb", buffering=0) as file:
        read_exactly(file, stored, stored.offset, differences.view(np.uint8))
    tokens = np.arange(len(differences)) + differences.astype(np.int64)
    if tokens.min() < 0 or tokens.max() >= vocab_size or len(np.unique(tokens)) < len(tokens):
        raise BrokenModelFile(
            f"d2t in {stored.path} maps {len(tokens)} draft tokens to {len(np.unique(tokens))} tokens from "
            f"{tokens.min()} to {tokens.max()}; each needs its own, from 0 to {vocab_size - 1}."
        )
    return torch.from_numpy(tokens).to(device)
