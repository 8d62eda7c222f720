"""Whether a request left itself nothing to choose: what its parameters and its grammar forbid, taken together.

For a sequence that ended without a token; whoever still runs is never looked at.
"""

import numpy as np

from quire.core.ids import IntArray
from quire.core.request import Sequence


def is_cornered(sequence: Sequence, mask: IntArray | None, vocab_size: int) -> bool:
    """`mask` is what its grammar allows next, 32 tokens to a word; None if it follows none."""
    sampling, num_prompt = sequence.request.sampling, len(sequence.request.prompt)
    left = np.ones(vocab_size, dtype=np.bool_)
    if mask is not None:
        left &= np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab_size].astype(np.bool_)
    if sampling.allowed_ids is not None:
        left &= np.isin(np.arange(vocab_size), sampling.allowed_ids)
    if len(sequence.tokens) - num_prompt < sampling.min_tokens:
        left[list(sampling.end_ids)] = False
    for *beginning, last in sampling.bad_words:
        if sequence.tokens[len(sequence.tokens) - len(beginning) :].tolist() == beginning:
            left[last] = False
    return not left.any()
