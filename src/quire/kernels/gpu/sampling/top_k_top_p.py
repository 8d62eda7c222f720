"""Top-k and top-p without sorting: the last kept token of a row is found in ever smaller sets of tokens.

All tokens are counted in bins by their exponents (`bins_of`). The counts bound the bins of the last token that may be
drawn (`find_bracket`); the few tokens of those bins are the row's candidates, listed by `sample`. Bisection over their
keys (`find_last`) ends at one token. With more candidates than the list holds (tens of thousands of equal logits), the
whole row is read instead: slower, same result.
"""

import triton
import triton.language as tl

from quire.kernels.gpu.sampling.probabilities import ONE, exponents_of, key_of, order_of, weights_of

BINS = tl.constexpr(512)
_LAST_BIN = tl.constexpr(511)  # only tokens of weight 0
_WIDEST = tl.constexpr(28.0)  # a token with a lower exponent has weight 0: exp(-28) < 2**-40
_NARROWEST = tl.constexpr(1e-6)
_SLACK = tl.constexpr(1e-4)  # for rounding at the edges of bins and in their exponentials
CHUNK = tl.constexpr(2048)  # candidates per iteration


@triton.jit
def bins_per_exponent(highest, lowest, temperature):
    """Such that the row's weights fill all bins but the last. `lowest` is the row's lowest logit above -inf."""
    width = -exponents_of(lowest, highest, temperature)
    return tl.div_rn(BINS - 2.0, tl.minimum(tl.maximum(width, _NARROWEST), _WIDEST))


@triton.jit
def bins_of(exponents, scale):
    """int32, 0 for the most likely token: a monotonic function of the logit."""
    return tl.minimum(-exponents * scale, BINS - 1.0).to(tl.int32)


@triton.jit
def find_bracket(counts, scale, total, top_k, top_p, least, vocab_size):
    """(first, last): the last token that may be drawn is in one of these bins; first > last if nothing is filtered.

    counts: [BINS] int32; total: int64, the weight of all tokens. Counts times the smallest and largest
    weight of a token of the bin bound every sum.
    """
    bins = tl.arange(0, BINS)
    least_share = least.to(tl.float64) / ONE
    heaviest = (tl.exp(-bins.to(tl.float32) / scale) * (1.0 + _SLACK)).to(tl.float64)
    lightest = (tl.exp(-(bins + 1).to(tl.float32) / scale) * (1.0 - _SLACK)).to(tl.float64) - 1.0 / ONE
    heaviest = tl.where((bins == _LAST_BIN) | (heaviest < least_share), 0.0, heaviest)
    lightest = tl.where((bins == _LAST_BIN) | (lightest < least_share), 0.0, tl.maximum(lightest, 0.0))
    most = counts.to(tl.float64) * heaviest
    fewest = counts.to(tl.float64) * lightest

    bin_of_k = tl.sum((tl.cumsum(counts, 0) < top_k).to(tl.int32))
    cut_by_k = (bin_of_k < _LAST_BIN) & (top_k < vocab_size)  # else all are kept, whatever their bins
    share = total.to(tl.float64) / ONE
    left_most = tl.where(cut_by_k, tl.sum(tl.where(bins <= bin_of_k, most, 0.0)), share)
    left_fewest = tl.where(cut_by_k, tl.sum(tl.where(bins < bin_of_k, fewest, 0.0)), share)

    most_before, fewest_before = tl.cumsum(most, 0), tl.cumsum(fewest, 0)  # each bin included
    most_after, fewest_after = tl.sum(most) - most_before, tl.sum(fewest) - fewest_before
    may_reach = tl.minimum(most_before, share - fewest_after) >= left_fewest * top_p
    must_reach = tl.maximum(fewest_before, share - most_after) >= left_most * top_p
    first = tl.sum(1 - may_reach.to(tl.int32))
    last = tl.minimum(tl.sum(1 - must_reach.to(tl.int32)), _LAST_BIN - 1)
    last = tl.where(cut_by_k, bin_of_k, last)
    first = tl.minimum(first, last)
    first = tl.where(top_p < 1.0, first, tl.where(cut_by_k, bin_of_k, BINS))
    return first, last


@triton.jit
def measure(logits, listed, count, num_listed, highest, temperature, least, from_key, below_key, id_limit):
    """(number, weight) of the tokens with keys in [from_key, below_key) and ids below the limit.

    logits: the row's; listed: ids of all its tokens that may have such keys. `count` and `num_listed` say how many;
    if there is no list, they are the size of the vocabulary and 0.
    """
    number = tl.zeros([], dtype=tl.int64)
    weight = tl.zeros([], dtype=tl.int64)
    for start in range(0, count, CHUNK):
        places = start + tl.arange(0, CHUNK)
        inside = places < count
        among = places < num_listed
        ids = tl.where(among, tl.load(listed + places, mask=among, other=0), places)
        values = tl.load(logits + ids, mask=inside, other=float("-inf"))
        keys = key_of(order_of(values), ids)
        kept = inside & (keys >= from_key) & (keys < below_key) & (ids < id_limit)
        weights = weights_of(exponents_of(values, highest, temperature), least)
        number += tl.sum(kept.to(tl.int64))
        weight += tl.sum(tl.where(kept, weights, 0))
    return number, weight


@triton.jit
def find_last(
    logits, listed, count, num_listed, highest, temperature, least,
    low, high, number, need, vocab_size, BY_NUMBER: tl.constexpr,
):  # fmt: skip
    """(key, number): the tokens from this key up to `high` are the fewest that reach `need`. Bisection over keys.

    `need` is a number or a weight. The tokens from `low` up, `number` of them, reach it.
    """
    top = high
    number_above = tl.zeros([], dtype=tl.int64)
    while number - number_above > 1:
        middle = low + ((high - low) >> 1)
        reached_number, reached_weight = measure(
            logits, listed, count, num_listed, highest, temperature, least, middle, top, vocab_size
        )
        if BY_NUMBER:
            enough = reached_number >= need
        else:
            enough = reached_weight >= need
        low = tl.where(enough, middle, low)
        number = tl.where(enough, reached_number, number)
        high = tl.where(enough, high, middle)
        number_above = tl.where(enough, number_above, reached_number)
    return low, number
