"""An EAGLE-3 head: drafts from the hidden states of the model that verifies them.

One layer. It reads the embedding of a token beside a hidden state of the position before: of the model, three of its
layers fused by `fc`; behind the last token of a row, the head's own output for the draft before. Attention is over such
pairs, so there is one fewer than tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.model import EagleSpec
from quire.kernels.interface import AttentionRule, Kernels, PackedMatrix, StepLayout
from quire.layers.attention import Attention, Heads
from quire.layers.linear import GatedMlp, Linear
from quire.layers.rope import RopeTable
from quire.models.interface import KvGeometry
from quire.models.parameters import DecoderWeights, as_tensor

Embed = Callable[[Tensor], Tensor]  # tokens [n] int64 to [n, hidden]


@dataclass(frozen=True, slots=True)
class EagleWeights:
    """Matrices are [out, in] in the model's dtype, norms and biases float32."""

    fuse: Tensor  # [hidden, captured * target hidden]
    hidden_norm: Tensor  # [hidden]
    layer: DecoderWeights  # of one layer, whose qkv is twice as wide; an embedding without rows: that of the model
    target_tokens: Tensor | None  # [draft vocabulary] int64: the model's token of each; None: the same


class EagleHead:
    """The head over a KV store of its own, for sequences of up to `max_length` tokens."""

    row_decoder = None

    def __init__(
        self, spec: EagleSpec, weights: EagleWeights, kernels: Kernels, max_length: int, target_embed: Embed
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        layer, (own,) = spec.layer, weights.layer.layers
        self._dtype = weights.fuse.dtype
        self._activation_dtype = kernels.activation_dtype(self._dtype)
        self._fuse = Linear(kernels, weights.fuse)
        self._hidden_norm, self._token_norm, self._mlp_norm = weights.hidden_norm, own.attention_norm, own.mlp_norm
        self._final_norm = weights.layer.final_norm
        qkv, output = Linear(kernels, own.qkv, own.qkv_bias), Linear(kernels, own.output, own.output_bias)
        gate_up, down = Linear(kernels, own.gate_up), Linear(kernels, own.down)
        heads = Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim)
        self._attention = Attention(heads, AttentionRule(layer.scale), qkv, output, None)
        self._mlp = GatedMlp(kernels, gate_up, down, layer.activation)
        self._head = as_tensor(weights.layer.head)
        self._packed_head: PackedMatrix = kernels.pack_head(self._head)
        self._target_tokens = weights.target_tokens
        self._rope = RopeTable(layer.rope, max_length, self._activation_dtype, self._head.device)
        self._matrices = [self._packed_head, *(each.packed for each in (self._fuse, qkv, output, gate_up, down))]
        self._embed = self._own_embed(as_tensor(weights.layer.embedding)) if spec.own_embedding else target_embed

    def _own_embed(self, weight: Tensor) -> Embed:
        table: PackedMatrix = self._kernels.pack_head(weight) if self._kernels.packs_embedding else weight
        self._matrices.append(table)
        return lambda tokens: self._kernels.embed(tokens, table).to(self._activation_dtype)

    @property
    def vocab_size(self) -> int:
        """Of the model."""
        return self._spec.target_vocab_size

    @property
    def hidden_size(self) -> int:
        return self._spec.layer.hidden_size

    @property
    def num_bytes(self) -> int:
        """Of its matrices as they are in memory."""
        return sum(matrix.nbytes for matrix in self._matrices)

    @property
    def kv_geometry(self) -> KvGeometry:
        return KvGeometry.of(self._spec.layer, self._kernels.kv_dtype(self._dtype))

    def truncated(self) -> "EagleHead":
        return self

    @torch.inference_mode()
    def fuse(self, states: Tensor) -> Tensor:
        """states: [tokens, captured * target hidden], of the model. [tokens, hidden]."""
        return self._fuse(states.to(self._activation_dtype))

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        layout: StepLayout,
        kv: Tensor,
        selected: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """tokens: [tokens] int64; features: [tokens, hidden], of the position before each token: fused, or of this
        method; None, for measurements: zeros. Returns [n, hidden], not normed."""
        kernels, epsilon = self._kernels, self._spec.layer.norm_eps
        embedded = self._embed(tokens)
        before = torch.zeros_like(embedded) if features is None else features.to(embedded.dtype)
        normed = kernels.rms_norm(before, self._hidden_norm, epsilon)
        both = torch.cat([kernels.rms_norm(embedded, self._token_norm, epsilon), normed], dim=-1)
        rotation = self._rope.at(layout.positions, layout.max_lengths)
        step = kernels.plan(layout, block_size=kv.shape[3])
        attended = self._attention(both, rotation, step, kv[:, 0], selected)
        residual = (normed if self._spec.norm_before_residual else before).float()
        residual = residual.clone() if selected is None else residual.index_select(0, selected)
        normed = kernels.add_rms_norm(attended, residual, self._mlp_norm, epsilon)
        kernels.add_rms_norm(self._mlp(normed), residual, self._final_norm, epsilon)
        return residual

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden] of `forward`. [rows, vocabulary of the model] float32; -inf: never drafted."""
        assert out is None, "no head is captured"
        normed = self._kernels.rms_norm(hidden.to(self._activation_dtype), self._final_norm, self._spec.layer.norm_eps)
        logits = self._kernels.logits(normed, self._packed_head, self._head)
        if self._target_tokens is None:
            return logits
        widened = torch.full((len(logits), self.vocab_size), -torch.inf, device=logits.device)
        return widened.index_copy_(1, self._target_tokens, logits)
