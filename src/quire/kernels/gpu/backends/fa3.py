"""FlashAttention-3 over the paged store: its own wheel (`flash_attn_interface`), or the operator of vLLM's build of it.

Both read lengths on the device, so a CUDA graph can hold them. Selection is in attention_backends.py.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from quire.kernels.attention_backends import FA3_WHEEL, has_module, vllm_fa3_library
from quire.kernels.gpu.backends.interface import BackendSequences, window_left
from quire.kernels.interface import AttentionRule

# Queries, keys [blocks, block_size, kv_heads, dim], values, sequences, rule, output; queries and output:
# [tokens, heads, dim].
Call = Callable[[Tensor, Tensor, Tensor, BackendSequences, AttentionRule, Tensor], None]

# Arguments that vLLM's operator requires and that are not used here.
_UNUSED = dict.fromkeys(
    ("k_new", "v_new", "q_v", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k",
     "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata",
     "pack_gqa", "s_aux", "cp_tot_seqused_k")
)  # fmt: skip
_NEUTRAL = {"is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}


class Fa3:
    """One call serves any number of decodes and chunks."""

    __slots__ = ("_call",)

    capturable = True

    def __init__(self, call: Call) -> None:
        self._call = call

    @staticmethod
    def load() -> "Fa3":
        if has_module(FA3_WHEEL):
            return Fa3(by_wheel(import_module(FA3_WHEEL).flash_attn_with_kvcache))
        library = vllm_fa3_library()
        assert library is not None, "loaded only after it was found"
        torch.ops.load_library(str(library))
        return Fa3(by_operator(torch.ops._vllm_fa3_C.fwd))

    def prepare(self, sequences: BackendSequences) -> "Fa3Attention":
        return Fa3Attention(self._call, sequences)


class Fa3Attention:
    """Some sequences of one step."""

    __slots__ = ("_call", "_sequences")

    def __init__(self, call: Call, sequences: BackendSequences) -> None:
        self._call = call
        self._sequences = sequences

    def takes(self, kv_layer: Tensor) -> bool:
        return True

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        keys, values = kv_layer.unbind(1)
        self._call(query, keys, values, self._sequences, rule, output.view(query.shape))


def by_wheel(attend: Callable[..., Tensor]) -> Call:
    """`flash_attn_with_kvcache`, which has no output argument."""

    def call(
        query: Tensor, keys: Tensor, values: Tensor, sequences: BackendSequences, rule: AttentionRule, output: Tensor
    ) -> None:
        result = attend(
            query,
            keys,
            values,
            cache_seqlens=sequences.context_lengths,
            page_table=sequences.tables,
            cu_seqlens_q=sequences.query_starts,
            max_seqlen_q=sequences.max_queries,
            softmax_scale=rule.scale,
            causal=True,
            window_size=(window_left(rule), 0),  # causal
            softcap=rule.softcap,
        )
        output.copy_(result)

    return call


def by_operator(forward: Callable[..., object]) -> Call:
    """vLLM's operator, which has no defaults and writes into an output tensor."""

    def call(
        query: Tensor, keys: Tensor, values: Tensor, sequences: BackendSequences, rule: AttentionRule, output: Tensor
    ) -> None:
        forward(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=sequences.query_starts,
            seqused_k=sequences.context_lengths,
            max_seqlen_q=sequences.max_queries,
            max_seqlen_k=sequences.tables.shape[1] * keys.shape[1],
            page_table=sequences.tables,
            softmax_scale=rule.scale,
            is_causal=True,
            window_size_left=window_left(rule),
            window_size_right=0,
            softcap=rule.softcap,
            **_UNUSED,
            **_NEUTRAL,
        )

    return call
