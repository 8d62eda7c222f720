"""A head that drafts from the hidden states of the model that verifies them.

One layer. It reads the embedding of a token beside a hidden state of the position before: of the model; behind the last
token of a row, the head's own output for the draft before. Attention is over such pairs, so there is one fewer than
tokens. Kinds of heads differ in what weights they have:

                  state of the model                  queries, keys and values read           embedding, head
    EAGLE-3       three of its layers, fused by `fc`  embedding and state; the state goes on  own or the model's, own
    MTP layer     what leaves its last layer          both joined by a matrix, which goes on  both the model's
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.core.model import DraftHeadSpec
from quire.kernels.interface import AttentionRule, Kernels, PackedMatrix, StepLayout
from quire.layers.attention import Attention, Heads
from quire.layers.linear import GatedMlp, Linear
from quire.layers.rope import RopeTable
from quire.models.interface import KvGeometry
from quire.models.parameters import DecoderWeights, as_tensor

Embed = Callable[[Tensor], Tensor]  # tokens [n] int64 to [n, hidden]
Logits = Callable[[Tensor], Tensor]  # [n, hidden], normed, to [n, vocab] float32


@dataclass(frozen=True, slots=True)
class DraftHeadWeights:
    """Matrices are [out, in] in the model's dtype, norms and biases float32."""

    fuse: Tensor | None  # [hidden, captured * target hidden]; None: one state is read as it is
    hidden_norm: Tensor  # [hidden]
    layer: DecoderWeights  # of one layer; an embedding or a head without rows: that of the model
    target_tokens: Tensor | None  # [draft vocabulary] int64: the model's token of each; None: the same
    join: Tensor | None = None  # [hidden, 2 * hidden], of state and embedding; None: qkv is twice as wide, reads both
    token_norm: Tensor | None = None  # [hidden]; None: the first norm of the layer


class DraftHead:
    """The head over a KV store of its own, for sequences of up to `max_length` tokens."""

    row_decoder = None

    def __init__(
        self,
        spec: DraftHeadSpec,
        weights: DraftHeadWeights,
        kernels: Kernels,
        max_length: int,
        target_embed: Embed,
        target_logits: Logits | None = None,  # for a spec without a head of its own
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        layer, (own,) = spec.layer, weights.layer.layers
        self._dtype = as_tensor(own.qkv).dtype
        self._activation_dtype = kernels.activation_dtype(self._dtype)
        self._fuse = None if weights.fuse is None else Linear(kernels, weights.fuse)
        self._join = None if weights.join is None else Linear(kernels, weights.join)
        self._hidden_norm, self._attention_norm = weights.hidden_norm, own.attention_norm
        self._token_norm = own.attention_norm if weights.token_norm is None else weights.token_norm
        self._mlp_norm, self._final_norm = own.mlp_norm, weights.layer.final_norm
        qkv = Linear(kernels, own.qkv, self._bias(own.qkv_bias))
        output = Linear(kernels, own.output, self._bias(own.output_bias))
        gate_up, down = Linear(kernels, own.gate_up), Linear(kernels, own.down)
        heads = Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim)
        self._attention = Attention(heads, AttentionRule(layer.scale), qkv, output, None)
        self._mlp = GatedMlp(kernels, gate_up, down, layer.activation)
        self._target_tokens = weights.target_tokens
        self._rope = RopeTable(layer.rope, max_length, self._activation_dtype, weights.hidden_norm.device)
        linears = (self._fuse, self._join, qkv, output, gate_up, down)
        self._matrices: list[PackedMatrix] = [each.packed for each in linears if each is not None]
        self._embed = self._own_embed(as_tensor(weights.layer.embedding)) if spec.own_embedding else target_embed
        self._logits = self._own_logits(as_tensor(weights.layer.head)) if spec.own_head else target_logits

    def _bias(self, bias: Tensor | None) -> Tensor | None:
        return None if bias is None else bias.to(self._activation_dtype)

    def _own_embed(self, weight: Tensor) -> Embed:
        table: PackedMatrix = self._kernels.pack_head(weight) if self._kernels.packs_embedding else weight
        self._matrices.append(table)
        return lambda tokens: self._kernels.embed(tokens, table).to(self._activation_dtype)

    def _own_logits(self, weight: Tensor) -> Logits:
        packed: PackedMatrix = self._kernels.pack_head(weight)
        self._matrices.append(packed)
        return lambda normed: self._kernels.logits(normed, packed, weight)

    @property
    def source(self) -> str:
        """Its name among drafters."""
        return self._spec.source

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

    def truncated(self) -> "DraftHead":
        return self

    @torch.inference_mode()
    def fuse(self, states: Tensor) -> Tensor:
        """states: [tokens, captured * target hidden], of the model. [tokens, hidden]."""
        states = states.to(self._activation_dtype)
        return states if self._fuse is None else self._fuse(states)

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
        entering, residual = self._pairs(embedded, before)
        rotation = self._rope.at(layout.positions, layout.max_lengths)
        step = kernels.plan(layout, block_size=kv.shape[3])
        attended = self._attention(entering, rotation, step, kv[:, 0], selected)
        residual = residual.float()
        residual = residual.clone() if selected is None else residual.index_select(0, selected)
        normed = kernels.add_rms_norm(attended, residual, self._mlp_norm, epsilon)
        kernels.add_rms_norm(self._mlp(normed), residual, self._final_norm, epsilon)
        return residual

    def _pairs(self, embedded: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """What queries, keys and values read of each pair, and what the layer adds to. Both: [tokens, hidden]."""
        kernels, epsilon = self._kernels, self._spec.layer.norm_eps
        state = kernels.rms_norm(before, self._hidden_norm, epsilon)
        token = kernels.rms_norm(embedded, self._token_norm, epsilon)
        if self._join is None:
            return torch.cat([token, state], dim=-1), state if self._spec.norm_before_residual else before
        joined = self._join(torch.cat([state, token], dim=-1))
        return kernels.rms_norm(joined, self._attention_norm, epsilon), joined

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden] of `forward`. [rows, vocabulary of the model] float32; -inf: never drafted."""
        assert out is None, "the logits of a head have no buffer"
        normed = self._kernels.rms_norm(hidden.to(self._activation_dtype), self._final_norm, self._spec.layer.norm_eps)
        assert self._logits is not None, "there is neither a head of its own nor that of the model"
        logits = self._logits(normed)
        if self._target_tokens is None:
            return logits
        widened = torch.full((len(logits), self.vocab_size), -torch.inf, device=logits.device)
        return widened.index_copy_(1, self._target_tokens, logits)
