"""CPU kernels in C++: packed weights, paged attention and whole layers, on threads of their own.

Activations are float32. Weights are as stored: 4 to 8 bits, 16-bit or float32; with less than 16 bits, activations are
rounded to 16 bits in groups of 32 for each product. All layers of a step are one call. Results do not depend on the
batch, unless many tokens are computed in bfloat16 on a matrix unit (AMX).
"""

import ctypes
import weakref
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray
from quire.kernels.cpu.native_library import (
    NativeDecodeCall,
    NativeHeads,
    NativeLayer,
    NativeLibrary,
    NativeLinear,
    NativeModel,
    NativeProfile,
    NativeRowColumns,
    NativeSamplingColumns,
    NativeStep,
    NativeTables,
    PackedFormat,
)
from quire.kernels.cpu.packed_weight import PackedWeight, pack_weight, unpack_rows
from quire.kernels.cpu.weight_memory import WeightMemory
from quire.kernels.interface import (
    AttentionRule,
    DecoderTables,
    HeadNorm,
    LayerCapture,
    PartialSums,
    Rotation,
    StackedLayer,
    StackSpec,
    StepLayout,
    Weight,
)
from quire.kernels.row_interface import DraftOutcome, EndColumns, RowColumns, SamplingTable

_KV_FORMATS = {
    torch.float32: PackedFormat.FLOAT32,
    torch.float16: PackedFormat.FLOAT16,
    torch.bfloat16: PackedFormat.BFLOAT16,
    torch.int8: PackedFormat.INT8,
}
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
MAX_HEAD_DIM, MAX_GROUP = 512, 64  # of the attention kernels


class NativeKernels:
    """Every operation by the native library, on a pool of threads."""

    name = "cpu"
    packs_embedding = True

    def __init__(
        self,
        library: NativeLibrary,
        num_threads: int,
        quantization: str | None = None,
        kv_dtype: torch.dtype | None = None,
        *,
        matrix_unit: bool = False,
    ) -> None:
        self._library = library
        self._call = library.functions
        self._quantization = quantization
        self._kv_dtype = kv_dtype
        self._memory = WeightMemory()
        self.workspace = self._call.quire_open(num_threads, matrix_unit)
        weakref.finalize(self, self._call.quire_close, self.workspace)

    @property
    def variant(self) -> str:
        return self._library.name

    @property
    def uses_matrix_unit(self) -> bool:
        """Whether many tokens are computed in bfloat16 on one: it was asked for, and is there."""
        return bool(self._call.quire_uses_matrix_unit(self.workspace))

    def activation_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32

    def kv_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # float16 has three more mantissa bits than bfloat16; values beyond its range are clamped.
        return self._kv_dtype or (torch.float32 if dtype is torch.float32 else torch.float16)

    def set_threads(self, active: int | None) -> None:
        """How many threads compute; None: as many as other programs leave cores for, which is the default."""
        self._call.quire_set_threads(self.workspace, active or 0)

    @property
    def active_threads(self) -> int:
        return int(self._call.quire_active_threads(self.workspace))

    def profile(self) -> NativeProfile:
        """Time by kind of work since the last call."""
        profile = NativeProfile()
        self._call.quire_profile(self.workspace, ctypes.byref(profile))
        return profile

    def pack(self, weight: Weight) -> PackedWeight:
        return pack_weight(self._library, self.workspace, weight, self._quantization, self._memory)

    def pack_head(self, weight: Weight) -> PackedWeight:
        """The head decides every token: not fewer than 8 bits, unless it is stored so."""
        return pack_weight(self._library, self.workspace, weight, "int8" if self._quantization else None, self._memory)

    def embed(self, tokens: Tensor, table: PackedWeight) -> Tensor:
        return unpack_rows(self._library, table, tokens.numpy(), 1.0)

    def linear(self, x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
        x = x.float().contiguous()
        output = torch.empty(len(x), packed.shape[0])
        self._call.quire_linear(self.workspace, ctypes.byref(packed.native), x.data_ptr(), len(x), output.data_ptr())
        return output if bias is None else output.add_(bias)

    def linear_unreduced(self, x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
        return self.linear(x, packed, bias)

    def logits(self, x: Tensor, packed: PackedWeight, weight: Tensor | None, out: Tensor | None = None) -> Tensor:
        logits = self.linear(x, packed, None)
        return logits if out is None else out.copy_(logits)

    def rms_norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        x = x.float().contiguous()
        output = torch.empty_like(x)
        self._norm(x, None, weight, epsilon, output)
        return output

    def add_rms_norm(self, x: Tensor | PartialSums, residual: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        assert isinstance(x, Tensor) and residual.is_contiguous(), "these kernels give whole sums, in float32"
        output = torch.empty_like(residual)
        self._norm(x.float().contiguous(), residual, weight, epsilon, output)
        return output

    def _norm(self, x: Tensor, residual: Tensor | None, weight: Tensor, epsilon: float, output: Tensor) -> None:
        width = x.shape[-1]
        self._call.quire_norm(
            self.workspace,
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            x.numel() // width if width else 0,
            width,
            epsilon,
            weight.data_ptr(),
            output.data_ptr(),
        )

    def act_and_mul(self, gate_up: Tensor, activation: str) -> Tensor:
        gate_up = gate_up.float().contiguous()
        width = gate_up.shape[-1] // 2
        output = torch.empty(len(gate_up), width)
        self._call.quire_gate(
            self.workspace, gate_up.data_ptr(), len(gate_up), width, _ACTIVATIONS[activation], output.data_ptr()
        )
        return output

    def draw_tokens(
        self, logits: Tensor, weights: Tensor, highest: Tensor, rows: Tensor, positions: Tensor, table: SamplingTable
    ) -> Tensor:
        """`DrawTokens`: a thread for each row."""
        logits, weights, highest, rows, positions = (
            each.contiguous() for each in (logits, weights, highest, rows, positions)
        )
        columns = NativeSamplingColumns(
            table.integers.data_ptr(), table.floats.data_ptr(), table.integers.stride(0), table.floats.stride(0)
        )
        tokens = torch.empty_like(rows)
        self._call.quire_draw(
            self.workspace,
            logits.data_ptr(),
            weights.data_ptr(),
            highest.data_ptr(),
            *logits.shape,
            rows.data_ptr(),
            positions.data_ptr(),
            ctypes.byref(columns),
            tokens.data_ptr(),
        )
        return tokens

    def plan(self, layout: StepLayout, block_size: int) -> "NativeAttention":
        return NativeAttention(self, layout)

    def stack(self, spec: StackSpec, layers: Sequence[StackedLayer]) -> "NativeStack | None":
        if spec.head_dim > MAX_HEAD_DIM or spec.num_heads // spec.num_kv_heads > MAX_GROUP:
            return None
        return NativeStack(self, spec, layers)


def _set_store(step: NativeStep, kv: Tensor) -> None:
    """kv: [blocks, layers, 2, block_size, kv_heads, dim], strided."""
    step.kv = kv.data_ptr()
    strides = kv.stride()
    step.block_stride, step.layer_stride, step.value_stride, step.token_stride, step.head_stride = strides[:5]
    step.kv_format, step.block_size = _KV_FORMATS[kv.dtype], kv.shape[3]


class _StepMemory:
    """A `NativeStep` and the tensors that it points to."""

    __slots__ = ("_kept", "native")

    def __init__(self, layout: StepLayout, rotations: Sequence[Rotation], kv: Tensor, selected: Tensor | None) -> None:
        """kv: [blocks, layers, 2, block_size, kv_heads, dim], strided."""
        tables = layout.tables.contiguous()
        self._kept = (layout, tables, rotations, selected)
        step = self.native = NativeStep()
        step.num_tokens, step.num_sequences = len(layout.positions), len(tables)
        step.slots = layout.slots.data_ptr()
        step.tables, step.table_width = tables.data_ptr(), tables.shape[1]
        step.starts, step.lengths = layout.query_starts.data_ptr(), layout.context_lengths.data_ptr()
        for index, rotation in enumerate(rotations):
            step.cos[index], step.sin[index] = rotation.cos.data_ptr(), rotation.sin.data_ptr()
            step.rotary[index] = rotation.cos.shape[-1]
        _set_store(step, kv)
        if selected is not None:
            step.selected, step.num_selected = selected.data_ptr(), len(selected)


class NativeAttention:
    """The attention of one step, one layer at a time."""

    def __init__(self, kernels: NativeKernels, layout: StepLayout) -> None:
        self._kernels = kernels
        self._layout = layout

    def rope_and_write_kv(self, qkv: Tensor, head_norm: HeadNorm | None, rotation: Rotation, kv_layer: Tensor) -> None:
        assert qkv.is_contiguous() and qkv.dtype is torch.float32
        step = _StepMemory(self._layout, [rotation], kv_layer[:, None], None)
        kv_heads = kv_layer.shape[3]
        heads = NativeHeads(qkv.shape[1] - 2 * kv_heads, kv_heads, qkv.shape[2], 1.0, 0.0)
        self._kernels._call.quire_rotate_and_write(
            self._kernels.workspace,
            ctypes.byref(heads),
            ctypes.byref(step.native),
            None if head_norm is None else head_norm.weight.data_ptr(),
            0.0 if head_norm is None else head_norm.epsilon,
            qkv.data_ptr(),
        )

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule) -> Tensor:
        assert query.stride()[1:] == (query.shape[2], 1) and query.dtype is torch.float32
        step = _StepMemory(self._layout, [], kv_layer[:, None], None)
        heads = NativeHeads(query.shape[1], kv_layer.shape[3], query.shape[2], rule.scale, rule.softcap)
        output = torch.empty(len(query), query.shape[1] * query.shape[2])
        self._kernels._call.quire_attend(
            self._kernels.workspace,
            ctypes.byref(heads),
            ctypes.byref(step.native),
            rule.window,
            query.data_ptr(),
            query.stride(0),
            output.data_ptr(),
        )
        return output


class NativeStack:
    """All layers of a decoder, in one call."""

    def __init__(self, kernels: NativeKernels, spec: StackSpec, layers: Sequence[StackedLayer]) -> None:
        self._kernels = kernels
        self._kept = (layers, spec)
        self._tables: NativeTables | None = None
        self._capture: LayerCapture | None = None
        self._layers = (NativeLayer * len(layers))()
        for native, layer in zip(self._layers, layers, strict=True):
            native.qkv = _with_bias(layer.qkv, layer.qkv_bias)
            native.output = _with_bias(layer.output, layer.output_bias)
            native.gate_up = _with_bias(layer.gate_up, layer.gate_up_bias)
            native.down = _with_bias(layer.down, layer.down_bias)
            native.attention_norm = layer.attention_norm.data_ptr()
            native.mlp_norm = layer.mlp_norm.data_ptr()
            native.attention_post_norm = _pointer(layer.attention_post_norm)
            native.mlp_post_norm = _pointer(layer.mlp_post_norm)
            native.head_norm = None if layer.head_norm is None else layer.head_norm.weight.data_ptr()
            native.window, native.rope = layer.rule.window, layer.rope
        rule = layers[0].rule
        self._model = NativeModel(
            NativeHeads(spec.num_heads, spec.num_kv_heads, spec.head_dim, rule.scale, rule.softcap),
            spec.hidden_size,
            spec.ffn_size,
            len(layers),
            _ACTIVATIONS[spec.activation],
            spec.norm_eps,
            spec.norm_eps,
            self._layers,
            spec.final_norm.data_ptr(),
        )

    def capture_into(self, capture: LayerCapture) -> None:
        self._capture = capture

    def captured_states(self, step: NativeStep, num_tokens: int) -> Tensor | None:
        """Memory for what enters the layers of a step, if it is captured."""
        if self._capture is None:
            return None
        assert self._capture.sink is None, "the host reads the states of native steps"
        layers = self._capture.layers
        states = self._capture.states = torch.empty(num_tokens, len(layers) * self._model.hidden)
        step.num_captured, step.captured = len(layers), states.data_ptr()
        step.captured_layers[: len(layers)] = layers
        return states

    def __call__(
        self, embedded: Tensor, layout: StepLayout, rotations: Sequence[Rotation], kv: Tensor, selected: Tensor | None
    ) -> Tensor:
        whole = self._capture is not None and len(self._layers) in self._capture.layers
        step = _StepMemory(layout, rotations, kv, None if whole else selected)
        self.captured_states(step.native, len(embedded))
        output = torch.empty_like(embedded)
        self._kernels._call.quire_forward(
            self._kernels.workspace,
            ctypes.byref(self._model),
            ctypes.byref(step.native),
            embedded.data_ptr(),
            output.data_ptr(),
        )
        if selected is None:
            return output
        return output[selected] if whole else output[: len(selected)]

    def greedy_step(
        self, tables: DecoderTables, rows: IntArray, columns: RowColumns, ends: EndColumns, kv: Tensor
    ) -> "NativeGreedyStep":
        return NativeGreedyStep(self, tables, rows, columns, ends, kv)

    def decode_logits(
        self, tables: DecoderTables, rows: IntArray, columns: RowColumns, ends: EndColumns, kv: Tensor
    ) -> Tensor:
        logits = torch.empty(len(rows), tables.head.shape[0])
        rows = np.ascontiguousarray(rows, np.int32)
        step = NativeStep()
        self.captured_states(step, len(rows))
        call = self.decode_call(step, tables, rows, columns, ends, kv)
        self._kernels._call.quire_decode_logits(call, logits.data_ptr())
        return logits

    def decode_call(
        self,
        step: NativeStep,
        tables: DecoderTables,
        rows: IntArray,
        columns: RowColumns,
        ends: EndColumns,
        kv: Tensor,
    ) -> NativeDecodeCall:
        """The caller keeps the rows and the tensors."""
        if self._tables is None:
            self._tables = _native_tables(tables)
        _set_store(step, kv)
        return NativeDecodeCall(
            self._kernels.workspace,
            ctypes.pointer(self._model),
            ctypes.pointer(self._tables),
            ctypes.pointer(_native_columns(columns, ends)),
            ctypes.pointer(step),
            rows.ctypes.data,
            len(rows),
        )


class NativeGreedyStep:
    """A step of greedy rows with its arguments prepared: in a step of one row, each look-up of a pointer counts, since
    the weights have just emptied the caches."""

    __slots__ = ("_address", "_call", "_decode", "_kept", "_outcome", "_tokens", "_verify")

    def __init__(
        self,
        stack: NativeStack,
        tables: DecoderTables,
        rows: IntArray,
        columns: RowColumns,
        ends: EndColumns,
        kv: Tensor,
    ) -> None:
        rows, step = np.ascontiguousarray(rows, np.int32), NativeStep()
        self._kept = (stack, tables, rows, columns, ends, kv, stack.captured_states(step, len(rows)))
        self._outcome: NDArray[np.int64] = np.empty((5, len(rows)), dtype=np.int64)
        self._tokens: IntArray = np.empty(len(rows), dtype=np.int32)
        self._decode, self._verify = stack._kernels._call.quire_decode_greedy, stack._kernels._call.quire_verify
        self._call = stack.decode_call(step, tables, rows, columns, ends, kv)
        self._call.outcome, self._call.tokens = self._outcome.ctypes.data, self._tokens.ctypes.data
        self._address = ctypes.addressof(self._call)

    def __call__(self) -> IntArray | None:
        return self._tokens.copy() if self._decode(self._address) else None

    @property
    def outcome(self) -> NDArray[np.int64]:
        return self._outcome.copy()

    def verify(self, counts: IntArray, tokens: NDArray[np.int64]) -> DraftOutcome:
        """States of layers are not captured."""
        assert self._kept[-1] is None, "a step with drafts captures no states"
        outcome: NDArray[np.int64] = np.empty((5, len(counts) + len(tokens)), dtype=np.int64)
        advances: IntArray = np.empty(len(counts), dtype=np.int32)
        outputs = (outcome.ctypes.data, advances.ctypes.data)
        self._verify(self._call, counts.ctypes.data, tokens.ctypes.data, *outputs)
        return DraftOutcome(outcome, advances)


def _native_columns(columns: RowColumns, ends: EndColumns) -> NativeRowColumns:
    native = NativeRowColumns()
    native.tables, native.table_width = columns.tables.data_ptr(), columns.tables.shape[1]
    native.max_lengths = columns.max_lengths.data_ptr()
    native.end_ids, native.num_end_ids = ends.end_ids.data_ptr(), ends.end_ids.shape[1]
    native.end_lengths, native.end_length_stride = ends.max_length.data_ptr(), ends.max_length.stride(0)
    native.last_tokens = columns.last_tokens.data_ptr()
    native.lengths, native.alive = columns.lengths.data_ptr(), columns.alive.data_ptr()
    return native


def _native_tables(tables: DecoderTables) -> NativeTables:
    native = NativeTables()
    native.embedding, native.head = ctypes.pointer(tables.embedding.native), ctypes.pointer(tables.head.native)
    native.num_ropes, native.vocab = len(tables.ropes), tables.head.shape[0]
    native.embedding_scale, native.softcap = tables.embedding_scale, tables.softcap
    for place, rope in zip(native.ropes, tables.ropes, strict=False):
        place.cos, place.sin = rope.cos.data_ptr(), rope.sin.data_ptr()
        place.num_positions, place.long_from, place.rotary = rope.num_positions, rope.long_from, rope.cos.shape[-1]
    return native


def _with_bias(packed: PackedWeight, bias: Tensor | None) -> NativeLinear:
    linear = NativeLinear.from_buffer_copy(packed.native)
    if bias is not None:
        assert bias.dtype is torch.float32, "biases of stacked layers are float32"
        linear.bias = bias.data_ptr()
    return linear


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
