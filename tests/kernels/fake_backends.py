"""Other libraries' attention as plain loops, from exactly the arguments that the library itself takes.

The libraries run on GPUs alone. What is tested with these is what our side hands over: pages, lengths, starts, windows.
"""

import torch
from torch import Tensor

NEVER = 10**9


def one_sequence(query: Tensor, keys: Tensor, values: Tensor, scale: float, left: int, softcap: float) -> Tensor:
    """query: [queries, heads, dim], the last ones of the sequence; keys, values: [keys, kv_heads, dim]."""
    num_queries, heads, _ = query.shape
    group = heads // keys.shape[1]
    wide = query.float(), keys.float().repeat_interleave(group, 1), values.float().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", *wide[:2]) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    places = len(keys) - num_queries + torch.arange(num_queries, device=query.device)
    back = places[:, None] - torch.arange(len(keys), device=query.device)[None, :]
    seen = (back >= 0) & (back <= (left if left >= 0 else NEVER))
    weights = torch.softmax(scores.masked_fill(~seen, float("-inf")), dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, wide[2]).to(query.dtype)


def paged(pool: Tensor, pages: Tensor, length: int) -> Tensor:
    """The first keys of one sequence. pool: [blocks, block_size, kv_heads, dim]; pages: [at least enough]."""
    size = pool.shape[1]
    return torch.stack([pool[int(pages[place // size]), place % size] for place in range(length)])


def layout(query, pools, tables, lengths, starts, max_queries, scale, left, softcap):
    """Tokens of no sequence, and of those without keys, become NaN: nobody may read them."""
    output = torch.full_like(query, torch.nan)
    assert tables.dtype == lengths.dtype == starts.dtype == torch.int32 and starts[0] == 0
    for sequence, length in enumerate(lengths.tolist()):
        first, end = starts[sequence : sequence + 2].tolist()
        assert end - first <= max_queries
        if end > first and length:
            keys, values = (paged(pool, tables[sequence], length) for pool in pools)
            output[first:end] = one_sequence(query[first:end], keys, values, scale, left, softcap)
    return output


def flash_attn_with_kvcache(
    q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size,
    softcap,
):  # fmt: skip
    """FlashAttention-3's own wheel."""
    assert causal and window_size[1] == 0
    pools = (k_cache, v_cache)
    return layout(
        q, pools, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size[0], softcap
    )


def vllm_forward(
    *, q, k, v, k_new, v_new, q_v, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k,
    max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary,
    q_descale, k_descale, v_descale, softmax_scale, is_causal, window_size_left, window_size_right, softcap,
    is_rotary_interleaved, scheduler_metadata, num_splits, pack_gqa, sm_margin, s_aux, cp_world_size, cp_rank,
    cp_tot_seqused_k,
):  # fmt: skip
    """The operator of vLLM's build: the names of its schema, and no defaults."""
    assert is_causal and window_size_right == 0 and max_seqlen_k >= int(seqused_k.max())
    answer = layout(
        q, (k, v), page_table, seqused_k, cu_seqlens_q, max_seqlen_q, softmax_scale, window_size_left, softcap
    )
    out.copy_(answer)


def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """torch's."""
    assert enable_gqa and window_size[1] == 0 and len(key) <= max_k and len(cu_seq_q) == 2
    length, end = int(cu_seq_k[1]), int(cu_seq_q[1])
    assert cu_seq_k[0] == 0 and end <= max_q
    output = torch.full_like(query, torch.nan)
    output[:end] = one_sequence(query[:end], key[:length], value[:length], scale, window_size[0], 0.0)
    return output


def earlier_varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size):
    """torch's before it wanted to be told that heads share keys."""
    return varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, scale=scale, window_size=window_size, enable_gqa=True
    )


class FlashInferWrapper:
    """FlashInfer's BatchDecodeWithPagedKVCacheWrapper, in its layout NHD."""

    def __init__(self):
        self.num_plans = 0

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left,
        logits_soft_cap, q_data_type, kv_data_type, sm_scale,
    ):  # fmt: skip
        assert indptr.device.type == last_page_len.device.type == "cpu"
        assert indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        self.num_plans += 1
        self.heads, self.kv_heads, self.dim = num_qo_heads, num_kv_heads, head_dim
        self.rows = [  # pages, and how many keys they hold
            (indices[begin:end], (end - begin - 1) * page_size + last if end > begin else 0)
            for begin, end, last in zip(indptr[:-1].tolist(), indptr[1:].tolist(), last_page_len.tolist(), strict=True)
        ]
        self.rule = (sm_scale, window_left, logits_soft_cap or 0.0)

    def run(self, q, paged_kv_cache, *, out):
        assert q.shape == (len(self.rows), self.heads, self.dim) and paged_kv_cache[0].shape[2] == self.kv_heads
        for row, (pages, length) in enumerate(self.rows):
            keys, values = (paged(pool, pages, length) for pool in paged_kv_cache) if length else (None, None)
            out[row] = one_sequence(q[row : row + 1], keys, values, *self.rule)[0] if length else torch.nan
