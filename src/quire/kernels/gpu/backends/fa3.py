"""FlashAttention-3 over our pages: its own wheel (`flash_attn_interface`), or the operator of vLLM's build of it.

Both read lengths on the device, so a graph may hold them. Knows nothing of when it is used.
"""

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from quire.kernels.attention_backends import FA3_WHEEL, has_module, vllm_fa3_library
from quire.kernels.gpu.backends.interface import BackendSequences, window_left
from quire.kernels.interface import AttentionRule

# Queries, keys [blocks, block_size, kv_heads, dim], values, the share, the rule, where the answer goes: all
# [tokens, heads, dim] but keys and values.
Call = Callable[[Tensor, Tensor, Tensor, BackendSequences, AttentionRule, Tensor], None]

# What vLLM's operator wants to be told although it plays no part here.
_UNUSED = dict.fromkeys(
    ("k_new", "v_new", "q_v", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx", "leftpad_k",
     "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale", "scheduler_metadata",
     "pack_gqa", "s_aux", "cp_tot_seqused_k")
)  # fmt: skip
_NEUTRAL = {"is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0}


class Fa3:
    """One call serves decodes and chunks, whatever their number."""

    __slots__ = ("_call",)

    capturable = True

    def __init__(self, call: Call) -> None:
        self._call = call

    @staticmethod
    def load() -> "Fa3":
        if has_module(FA3_WHEEL):
            return Fa3(by_wheel(import_module(FA3_WHEEL).flash_attn_with_kvcache))
        library = vllm_fa3_library()
        assert library is not None, "whoever loads it has found it"
        torch.ops.load_library(str(library))
        return Fa3(by_operator(torch.ops._vllm_fa3_C.fwd))

    def share(self, share: BackendSequences) -> "Fa3Share":
        return Fa3Share(self._call, share)


class Fa3Share:
    """Some sequences of one step."""

    __slots__ = ("_call", "_share")

    def __init__(self, call: Call, share: BackendSequences) -> None:
        self._call = call
        self._share = share

    def takes(self, kv_layer: Tensor) -> bool:
        return True

    def attend(self, query: Tensor, kv_layer: Tensor, rule: AttentionRule, output: Tensor) -> None:
        keys, values = kv_layer.unbind(1)
        self._call(query, keys, values, self._share, rule, output.view(query.shape))


def by_wheel(attend: Callable[..., Tensor]) -> Call:
    """`flash_attn_with_kvcache`: it has no argument for the output."""

    def call(
        query: Tensor, keys: Tensor, values: Tensor, share: BackendSequences, rule: AttentionRule, output: Tensor
    ) -> None:
        answer = attend(
            query,
            keys,
            values,
            cache_seqlens=share.context_lengths,
            page_table=share.tables,
            cu_seqlens_q=share.query_starts,
            max_seqlen_q=share.max_queries,
            softmax_scale=rule.scale,
            causal=True,
            window_size=(window_left(rule), 0),  # nothing behind the query is seen
            softcap=rule.softcap,
        )
        output.copy_(answer)

    return call


def by_operator(forward: Callable[..., object]) -> Call:
    """vLLM's operator, which has no defaults and writes where it is told to."""

    def call(
        query: Tensor, keys: Tensor, values: Tensor, share: BackendSequences, rule: AttentionRule, output: Tensor
    ) -> None:
        forward(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=share.query_starts,
            seqused_k=share.context_lengths,
            max_seqlen_q=share.max_queries,
            max_seqlen_k=share.tables.shape[1] * keys.shape[1],
            page_table=share.tables,
            softmax_scale=rule.scale,
            is_causal=True,
            window_size_left=window_left(rule),
            window_size_right=0,
            softcap=rule.softcap,
            **_UNUSED,
            **_NEUTRAL,
        )

    return call
