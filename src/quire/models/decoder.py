"""The decoder body of all model families. A family is a value of `ModelSpec`; nothing here tests a family's name."""

import copy
from dataclasses import fields
from functools import cached_property

import torch
from torch import Tensor

from quire.core.ids import IntArray
from quire.core.model import ModelSpec
from quire.dist.process_group import ProcessGroup
from quire.kernels.interface import (
    AttentionRule,
    DecoderTables,
    HeadNorm,
    Kernels,
    LayerCapture,
    LayerStack,
    PackedMatrix,
    PartialSums,
    StackedLayer,
    StackSpec,
    StepLayout,
)
from quire.kernels.row_interface import EndColumns, GreedyStep, RowColumns
from quire.layers.attention import Attention, Heads
from quire.layers.linear import GatedMlp, Linear, Projection
from quire.layers.parallel import ParallelVocabulary, RowParallelLinear, StageEnds
from quire.layers.rope import RopeTable
from quire.models.interface import KvGeometry
from quire.models.parameters import DecoderWeights, LayerWeights


class _Layer:
    """Attention and feed-forward of one layer, with their norms and RoPE parameters."""

    __slots__ = (
        "attention",
        "attention_norm",
        "attention_post_norm",
        "down",
        "gate_up",
        "head_norm",
        "kind",
        "mlp",
        "mlp_norm",
        "mlp_post_norm",
        "output",
        "qkv",
        "rope",
        "rule",
    )

    def __init__(
        self, spec: ModelSpec, index: int, weights: LayerWeights, kernels: Kernels, group: ProcessGroup | None
    ) -> None:
        heads = Heads(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        adds_bias = group is None or group.shard.rank == 0  # of what is summed over the ranks, once
        self.qkv = Linear(kernels, weights.qkv, weights.qkv_bias)
        self.output = Linear(kernels, weights.output, weights.output_bias if adds_bias else None)
        self.gate_up = Linear(kernels, weights.gate_up, weights.gate_up_bias)
        self.down = Linear(kernels, weights.down, weights.down_bias if adds_bias else None)
        self.head_norm = _head_norm(heads, weights, spec.norm_eps)
        self.rule = AttentionRule(spec.scale, spec.window(index), spec.attention_softcap)
        projection = _projection(self.output, weights.attention_post_norm, group)
        self.attention = Attention(heads, self.rule, self.qkv, projection, self.head_norm)
        down = _projection(self.down, weights.mlp_post_norm, group)
        self.mlp = GatedMlp(kernels, self.gate_up, down, spec.activation)
        self.attention_norm = weights.attention_norm
        self.attention_post_norm = weights.attention_post_norm
        self.mlp_norm = weights.mlp_norm
        self.mlp_post_norm = weights.mlp_post_norm
        self.rope = spec.layer_rope(index)
        present = tuple(getattr(weights, field.name) is not None for field in fields(weights))
        self.kind = (spec.window(index), self.rope, present)  # layers of one kind launch the same kernels

    def stacked(self, rope: int) -> StackedLayer:
        return StackedLayer(
            attention_norm=self.attention_norm,
            qkv=self.qkv.packed,
            qkv_bias=_as_float32(self.qkv.bias),
            head_norm=self.head_norm,
            output=self.output.packed,
            output_bias=_as_float32(self.output.bias),
            attention_post_norm=self.attention_post_norm,
            mlp_norm=self.mlp_norm,
            gate_up=self.gate_up.packed,
            gate_up_bias=_as_float32(self.gate_up.bias),
            down=self.down.packed,
            down_bias=_as_float32(self.down.bias),
            mlp_post_norm=self.mlp_post_norm,
            rule=self.rule,
            rope=rope,
        )


class Decoder:
    """A decoder-only transformer over a paged KV store, for sequences of up to `max_length` tokens.

    With a process group it is one rank of it: `spec` and `weights` are that rank's part (`core/sharding.py`). With
    `ends` it is a pipeline stage: all but the first get hidden states instead of tokens, all but the last send them on.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: DecoderWeights,
        kernels: Kernels,
        max_length: int,
        group: ProcessGroup | None = None,
        ends: StageEnds | None = None,
    ) -> None:
        self._spec = spec
        self._kernels = kernels
        self._receives = None if ends is None or ends.shard.is_first else ends.receive
        self._sends = None if ends is None or ends.shard.is_last else ends.send
        self._vocabulary = (
            None if group is None else ParallelVocabulary(spec.vocab_size, weights.embedding.shape[0], group)
        )
        self._packed_head = kernels.pack_head(weights.head) if self._sends is None else None
        self._head = weights.head if isinstance(weights.head, Tensor) and not kernels.packs_embedding else None
        self._table = _embedding_table(weights, kernels, self._packed_head)
        self._layers = [_Layer(spec, index, layer, kernels, group) for index, layer in enumerate(weights.layers)]
        # The last layer of a stage closes with a norm that is not read: the next stage begins with its own.
        self._final_norm = weights.final_norm if self._sends is None else weights.layers[-1].attention_norm
        dtype, device = weights.layers[0].qkv.dtype, weights.layers[0].qkv.device
        self._dtype = dtype
        self._activation_dtype = kernels.activation_dtype(dtype)
        ropes = dict.fromkeys(layer.rope for layer in self._layers)  # building a table is slow: one per distinct RoPE
        self._ropes = {rope: RopeTable(rope, max_length, self._activation_dtype, device) for rope in ropes}
        # Rounded to the model's dtype first, as these models were trained.
        self._embedding_scale = torch.tensor(spec.embedding_scale, dtype=dtype).item()
        self._stack = self._stacked() if group is None and ends is None else None  # ranks meet between halves of layers
        self._capture: LayerCapture | None = None

    def _stacked(self) -> LayerStack | None:
        spec, order = self._spec, {rope: index for index, rope in enumerate(self._ropes)}
        return self._kernels.stack(
            StackSpec(
                spec.num_heads,
                spec.num_kv_heads,
                spec.head_dim,
                spec.hidden_size,
                spec.ffn_size,
                spec.activation,
                spec.norm_eps,
                self._final_norm,
            ),
            [layer.stacked(order[layer.rope]) for layer in self._layers],
        )

    def capture(self, layers: tuple[int, ...]) -> LayerCapture:
        """Copy what enters these layers in every step from now on. For what leaves the last one, that is computed for
        all tokens, selected or not."""
        self._capture = LayerCapture(layers)
        if self._stack is not None:
            self._stack.capture_into(self._capture)
        return self._capture

    def refresh_norms(self, weights: DecoderWeights) -> None:
        """Copy QK norm weights again, after weights were loaded into the tensors given to `__init__`.

        Not for kernels that pack weights: those copied all of them.
        """
        assert self._packed_head is self._head, "weights were packed before they were loaded"
        for layer, filled in zip(self._layers, weights.layers, strict=True):
            if layer.head_norm is not None and filled.query_norm is not None and filled.key_norm is not None:
                layer.head_norm.weight[: self._spec.num_heads] = filled.query_norm
                layer.head_norm.weight[self._spec.num_heads :] = filled.key_norm

    def truncated(self) -> "Decoder":
        """With two layers of each kind: the first of a kind may launch differently from the others."""
        few = copy.copy(self)
        kinds = [layer.kind for layer in self._layers]
        few._stack = None
        few._layers = [layer for index, layer in enumerate(self._layers) if kinds[:index].count(layer.kind) < 2]
        return few

    @property
    def vocab_size(self) -> int:
        return self._spec.vocab_size

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    @property
    def matrices(self) -> tuple[PackedMatrix, ...]:
        """Every matrix as it is in memory, once: a head that is the embedding too is counted as one."""
        tables = (self._table,) if self._table is self._packed_head else (self._table, self._packed_head)
        tables = tuple(table for table in tables if table is not None)  # a pipeline stage has one of them, or none
        linears = ((layer.qkv, layer.output, layer.gate_up, layer.down) for layer in self._layers)
        return (*tables, *(linear.packed for layer in linears for linear in layer))

    @property
    def kv_geometry(self) -> KvGeometry:
        return KvGeometry.of(self._spec, self._kernels.kv_dtype(self._dtype))

    @torch.inference_mode()
    def forward(self, tokens: Tensor, layout: StepLayout, kv: Tensor, selected: Tensor | None = None) -> Tensor:
        """tokens: [tokens] int64; kv: the store, see `kernels.interface`; selected: [n] int64. [n, hidden], normed.

        After the last layer's attention only the selected tokens are computed. A stage before the last one sends the
        hidden states of all tokens to the next, and returns them.
        """
        rotations = {rope: table.at(layout.positions, layout.max_lengths) for rope, table in self._ropes.items()}
        embedded = self._embed(tokens) if self._receives is None else None
        if self._stack is not None:
            assert embedded is not None
            return self._stack(embedded, layout, tuple(rotations.values()), kv, selected)
        step = self._kernels.plan(layout, block_size=kv.shape[3])
        normed, residual = self._first_inputs(embedded, len(tokens))
        next_norms = [layer.attention_norm for layer in self._layers[1:]] + [self._final_norm]
        captured = () if self._capture is None else self._capture.layers
        states = None if self._capture is None else self._new_states(residual)
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            if states is not None and index in captured:
                self._copy_captured(index, residual, states)
            selects = layer is self._layers[-1] and self._sends is None and self._spec.num_layers not in captured
            rows_kept = selected if selects else None
            attended = layer.attention(normed, rotations[layer.rope], step, kv[:, index], rows_kept)
            if rows_kept is not None:
                residual = residual.index_select(0, rows_kept)
            normed = self._add(attended, residual, layer.attention_post_norm, layer.mlp_norm)
            normed = self._add(layer.mlp(normed), residual, layer.mlp_post_norm, next_norm)
        if self._capture is not None and states is not None:
            self._copy_captured(self._spec.num_layers, residual, states)
            self._capture.take(states, layout.slots)
            if self._spec.num_layers in captured and selected is not None:
                normed = normed.index_select(0, selected)
        if self._sends is None:
            return normed
        self._sends(residual)
        return residual

    def _new_states(self, residual: Tensor) -> Tensor:
        """For what enters the captured layers. In the dtype of the activations: so it is read, and of a long chunk
        float32 would take twice the memory."""
        assert self._capture is not None
        num_tokens, width = residual.shape
        return residual.new_empty(num_tokens, len(self._capture.layers) * width, dtype=self._activation_dtype)

    def _copy_captured(self, index: int, residual: Tensor, states: Tensor) -> None:
        """What enters this layer, to its places in the states."""
        assert self._capture is not None
        width = residual.shape[1]
        for place, layer in enumerate(self._capture.layers):
            if layer == index:
                states[:, place * width : (place + 1) * width] = residual

    def embed(self, tokens: Tensor) -> Tensor:
        """Rows of the embedding, not scaled. tokens: [tokens] int64. [tokens, hidden]."""
        return self._kernels.embed(tokens, self._table).to(self._activation_dtype)

    def _embed(self, tokens: Tensor) -> Tensor:
        if self._vocabulary is None:
            embedded = self._kernels.embed(tokens, self._table)
        else:
            embedded = self._vocabulary.embed(self._kernels, tokens, self._table)
        if self._embedding_scale != 1.0:
            embedded *= self._embedding_scale
        return embedded.to(self._activation_dtype)

    def _first_inputs(self, embedded: Tensor | None, num_tokens: int) -> tuple[Tensor, Tensor]:
        """What the first layer gets: normed, and the residual in float32, as dozens of additions in bfloat16 would lose
        accuracy (docs/log.md)."""
        norm, epsilon = self._layers[0].attention_norm, self._spec.norm_eps
        if embedded is not None:
            return self._kernels.rms_norm(embedded, norm, epsilon), embedded.float()
        assert self._receives is not None
        residual = self._receives(num_tokens)
        nothing = torch.zeros_like(residual, dtype=self._activation_dtype)  # the norm has the bits of `_add`
        return self._kernels.add_rms_norm(nothing, residual, norm, epsilon), residual

    @property
    def row_decoder(self) -> "Decoder | None":
        return None if self._stack is None else self

    def greedy_step(self, rows: IntArray, columns: RowColumns, ends: EndColumns, kv: Tensor) -> GreedyStep:
        assert self._stack is not None, "row_decoder is None"
        return self._stack.greedy_step(self._decoder_tables, rows, columns, ends, kv)

    def decode_logits(self, rows: IntArray, columns: RowColumns, ends: EndColumns, kv: Tensor) -> Tensor:
        assert self._stack is not None, "row_decoder is None"
        return self._stack.decode_logits(self._decoder_tables, rows, columns, ends, kv)

    @cached_property
    def _decoder_tables(self) -> DecoderTables:
        ropes = tuple(table.columns for table in self._ropes.values())
        return DecoderTables(self._table, self._embedding_scale, self._packed_head, self._spec.final_softcap, ropes)

    def _add(self, x: Tensor | PartialSums, residual: Tensor, post_norm: Tensor | None, next_norm: Tensor) -> Tensor:
        """Close one half of a layer: its post norm if any, the residual addition, the next norm."""
        if post_norm is not None:
            assert isinstance(x, Tensor), "an output with a post norm is already reduced"
            x = self._kernels.rms_norm(x, post_norm, self._spec.norm_eps)
        return self._kernels.add_rms_norm(x, residual, next_norm, self._spec.norm_eps)

    @torch.inference_mode()
    def logits(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        """hidden: [rows, hidden], normed. Returns [rows, vocab] float32: `out`, if given."""
        if self._vocabulary is None:
            logits = self._kernels.logits(hidden, self._packed_head, self._head, out)
        else:
            logits = self._vocabulary.gather(self._kernels.logits(hidden, self._packed_head, self._head))
            logits = logits if out is None else out.copy_(logits)
        cap = self._spec.final_softcap
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _embedding_table(weights: DecoderWeights, kernels: Kernels, packed_head: PackedMatrix) -> PackedMatrix:
    """None in a pipeline stage behind the first."""
    if not weights.embedding.shape[0]:
        return None
    if not kernels.packs_embedding:
        return weights.embedding
    return packed_head if weights.head is weights.embedding else kernels.pack_head(weights.embedding)


def _projection(linear: Linear, post_norm: Tensor | None, group: ProcessGroup | None) -> Projection:
    """The end of one half of a layer: `add_rms_norm` may reduce partial sums, and a post norm reads whole ones."""
    if group is not None:
        return RowParallelLinear(linear, group)
    return linear.unreduced if post_norm is None else linear


def _as_float32(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float()


def _head_norm(heads: Heads, weights: LayerWeights, epsilon: float) -> HeadNorm | None:
    if weights.query_norm is None or weights.key_norm is None:
        return None
    queries = weights.query_norm.expand(heads.queries, heads.dim)
    keys = weights.key_norm.expand(heads.keys, heads.dim)
    return HeadNorm(torch.cat([queries, keys]), epsilon)
