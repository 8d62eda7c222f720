"""Temperature, min-p, top-k, top-p, and the draw. Does not depend on rows; keeps no state.

Token weights are integers. Integer sums do not depend on the order of addition, so a row gets the same token alone
and in any batch, and the narrow top-k pass gives exactly what the full sort gives.
The random number of a draw is a pure function of (seed, sequence index, position): splitmix64 in int64 tensor
arithmetic, which wraps alike on every device. So it is the same on any machine, in any batch, after any preemption.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# The weight of the likeliest token. A token 2**-41 as likely has weight 0; the sum of 2**22 weights fits an int64.
ONE = 2**40

# On the CPU the likeliest few usually suffice, and a sort costs ten times as much: try these widths first.
_NARROW = (256, 2048)
# On a GPU checking whether they sufficed would synchronise; top-k up to this never needs the check.
_WIDEST_TOP_K = 1024


def token_weights(
    logits: Tensor,  # [n, vocab] float32
    highest: Tensor,  # [n] float32, the largest logit of each row
    temperature: Tensor,  # [n] float64, above 0
) -> Tensor:  # [n, vocab] int64, the largest of each row is ONE
    """Softmax at a temperature, up to its denominator. The largest exponent is 0, so nothing can overflow."""
    return unrounded_weights(logits, highest, temperature).long()


def unrounded_weights(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:  # [n, vocab] float32
    """`token_weights` before the fraction is cut off."""
    exponents = (logits - highest[:, None]).div_(temperature.float()[:, None])
    return exponents.exp_().mul_(ONE)


def drop_unlikely(
    weights: Tensor,  # [n, vocab] int64
    min_p: Tensor,  # [n] float64; 0 keeps all
) -> Tensor:  # [n, vocab] int64
    """Set to 0, in place, what is below min_p times the largest."""
    return weights.masked_fill_(weights < (min_p * ONE).ceil().long()[:, None], 0)


def ordering_keys(logits: Tensor) -> Tensor:  # [n, vocab] float32 -> [n, vocab] int64
    """Integers in the order of the logits, all different: of equal logits the lowest id comes out largest."""
    bits = (logits + 0.0).view(torch.int32)  # + 0.0 turns -0.0 into 0.0, which is its equal
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ascending.long().bitwise_left_shift_(32).sub_(torch.arange(logits.shape[-1], device=logits.device))


def ids_of(keys: Tensor) -> Tensor:
    """The token ids that these keys were made of."""
    return -keys & 0xFFFFFFFF


class SamplingCutoff(NamedTuple):
    """The last token that a row may draw, in order of likelihood."""

    lowest_key: Tensor  # [n] int64: the key of that token
    settled: Tensor  # [n] bool: the tokens examined were enough to decide


def keep_likeliest(
    logits: Tensor,  # [n, vocab] float32
    weights: Tensor,  # [n, vocab] int64
    top_k: Tensor,  # [n] int64, from 1 to vocab
    top_p: Tensor,  # [n] float64; 1 keeps all
    widest_top_k: int,  # the largest top_k, as the host knows it; vocab if any row has only top_p
) -> Tensor:  # [n, vocab] int64
    """Set to 0, in place, all but the top k, and of those all but the smallest set that reaches p."""
    keys = ordering_keys(logits)
    lowest_key = _lowest_keys(keys, weights, top_k, top_p, widest_top_k)
    return weights.masked_fill_(keys < lowest_key[:, None], 0)


def _lowest_keys(keys: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, widest_top_k: int) -> Tensor:
    vocab_size = keys.shape[-1]
    if widest_top_k <= min(_WIDEST_TOP_K, vocab_size):
        return _cut(keys, weights, top_k, top_p, widest_top_k).lowest_key
    widths = [width for width in _NARROW if width < vocab_size] if keys.device.type == "cpu" else []
    cut = _cut(keys, weights, top_k, top_p, widths[0] if widths else vocab_size)
    for width in (*widths[1:], vocab_size) if widths else ():
        rest = torch.nonzero(~cut.settled)[:, 0]
        if len(rest) == 0:
            break
        wider = _cut(keys[rest], weights[rest], top_k[rest], top_p[rest], width)
        cut.lowest_key[rest] = wider.lowest_key
        cut.settled[rest] = wider.settled
    return cut.lowest_key


def _cut(keys: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, width: int) -> SamplingCutoff:
    """Decide from the `width` most probable tokens of each row."""
    whole = width == keys.shape[-1]
    likeliest = (keys.sort(dim=-1, descending=True) if whole else keys.topk(width, dim=-1)).values
    among_top_k = torch.arange(width, device=keys.device) < top_k[:, None]
    reached = weights.gather(-1, ids_of(likeliest)).mul_(among_top_k).cumsum(-1)
    all_seen = top_k <= width
    cut_by_k = top_k < keys.shape[-1]
    left = torch.where(cut_by_k, reached[:, -1], weights.sum(-1))  # what top-k left; exact wherever it is settled
    goal = torch.where(top_p < 1, (left.double() * top_p).ceil().long(), left)
    last = (reached < goal[:, None]).sum(-1)
    settled = torch.where(cut_by_k, all_seen, last < width)
    return SamplingCutoff(likeliest.gather(-1, last.clamp(max=width - 1)[:, None])[:, 0], settled)


def draw(
    weights: Tensor,  # [n, vocab] int64
    chance: Tensor,  # [n] float64 in [0, 1)
) -> Tensor:  # [n] int64
    """Inverse of the cumulative distribution, tokens in the order of their ids."""
    reached = weights.cumsum(-1)
    total = reached[:, -1]
    goal = torch.minimum((chance * total.double()).long(), total - 1)
    return torch.searchsorted(reached, goal[:, None], right=True)[:, 0].clamp(max=weights.shape[-1] - 1)


def _signed(bits: int) -> int:
    """The int64 that has these 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


# Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators (2014); constants of the reference code.
_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_MANTISSA = 53  # bits that a float64 holds exactly


def uniform(
    seed: Tensor,  # [n] int64
    index: Tensor,  # [n] int64, which of its request's sequences
    position: Tensor,  # [n] int64, of the token to be drawn
) -> Tensor:  # [n] float64 in [0, 1)
    """For each (seed, index) the positions read off one splitmix64 stream."""
    stream = _mix(_mix(seed + _GOLDEN) + (index + 1) * _GOLDEN)
    bits = _mix(stream + (position + 1) * _GOLDEN)
    return _shift_right(bits, 64 - _MANTISSA).double() * 2.0**-_MANTISSA


def _mix(state: Tensor) -> Tensor:
    state = (state ^ _shift_right(state, 30)) * _FIRST
    state = (state ^ _shift_right(state, 27)) * _SECOND
    return state ^ _shift_right(state, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """A logical shift: int64's own `>>` would extend the sign bit."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)
