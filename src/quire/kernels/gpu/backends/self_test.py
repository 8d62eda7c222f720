"""Self-test of an attention library before its use: a small step of the model's shapes beside quire's kernels."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from quire.kernels.attention_backends import PARTS, AttentionNeeds
from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.backends.interface import AttentionBackend, BackendSequences
from quire.kernels.interface import AttentionRule, StepLayout

_TOLERANCE = {torch.float16: 8e-3, torch.bfloat16: 6e-2}  # for outputs of about 1
# (cached keys, new tokens) of each sequence.
_TEST_SEQUENCES = {"decodes": ((0, 1), (7, 1), (31, 1)), "chunks": ((0, 20), (25, 9)), "long_chunk": ((25, 40),)}
_NARROW = 5  # keys that a window is narrowed to, so that it ends within these sequences


@torch.inference_mode()
def self_test(load: Callable[[], AttentionBackend], part: str, needs: AttentionNeeds, device: torch.device) -> str:
    """Load it, and compare this part for every rule of the model. The error in one line; empty if it agrees."""
    rules = {*needs.rules, *(replace(rule, window=_NARROW) for rule in needs.rules if rule.window)}
    try:
        backend = load()
        for rule in rules:
            apart = _difference(backend, part, needs, rule, device)
            if not apart <= _TOLERANCE[needs.dtype]:
                return f"{PARTS[part]} differ by {apart:.3g} from quire's kernels on a small step"
    except Exception as error:  # another library may raise anything; then it is not used
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
    return ""


def _difference(
    backend: AttentionBackend, part: str, needs: AttentionNeeds, rule: AttentionRule, device: torch.device
) -> float:
    """The largest difference between both outputs of the same step."""
    layout, kv_layer, query = _step(part, needs, device)
    num_decodes = len(layout.context_lengths) if part == "decodes" else 0
    expected = GpuAttention(layout, num_decodes).attend(query, kv_layer, rule)
    output = torch.zeros_like(expected)
    longest = max(num_new for _, num_new in _TEST_SEQUENCES[part])
    sequences = BackendSequences(layout.tables, layout.query_starts, layout.context_lengths, longest)
    backend.prepare(sequences).attend(query, kv_layer, rule, output)
    return float((output.float() - expected.float()).abs().max())


def _step(part: str, needs: AttentionNeeds, device: torch.device) -> tuple[StepLayout, Tensor, Tensor]:
    """The step, its keys and values, and its queries, strided as in a model's QKV tensor."""
    generator = torch.Generator(device).manual_seed(0)
    sequences = _TEST_SEQUENCES[part]
    lengths = [before + new for before, new in sequences]
    starts = [0]
    for _, new in sequences:
        starts.append(starts[-1] + new)
    width = -(-max(lengths) // needs.block_size)
    num_blocks = width * len(sequences)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    nothing = torch.zeros(starts[-1], dtype=torch.int64, device=device)
    layout = StepLayout(
        positions=nothing,
        slots=nothing,
        tables=order.view(len(sequences), width).to(device, torch.int32),
        query_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lengths=torch.tensor(lengths, dtype=torch.int32, device=device),
        max_lengths=nothing,
    )
    heads, kv_heads, dim = needs.heads, needs.kv_heads, needs.dim
    shape = (num_blocks, 2, 2, needs.block_size, kv_heads, dim)  # two layers, so that blocks are strided
    store = torch.randn(shape, generator=generator, device=device).to(needs.dtype)
    qkv = torch.randn(starts[-1], heads + 2 * kv_heads, dim, generator=generator, device=device).to(needs.dtype)
    return layout, store[:, 1], qkv[:, :heads]
