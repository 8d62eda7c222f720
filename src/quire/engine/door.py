"""The engine's door: nothing gets in that could raise, or never fit, inside.

Whoever asks, whatever checked before: each request is validated here, in one place, against the model and the pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.core.errors import ContextLengthExceeded, InvalidParameter, InvalidPrompt, NeverFits, shown
from quire.core.ids import IntArray, RequestId
from quire.core.request import Request
from quire.core.sampling import SamplingParams, row_sampling
from quire.kv.manager import count_blocks


@dataclass(frozen=True, slots=True)
class Door:
    """The limits of one engine."""

    vocab_size: int  # the width of the logits
    end_ids: tuple[int, ...]
    max_length: int
    num_blocks: int
    block_size: int

    def admit(
        self,
        request_id: RequestId,
        prompt: Sequence[int],
        params: SamplingParams,
        bad_words: Sequence[tuple[int, ...]],
        fresh_seed: int,
    ) -> Request:
        """A valid request, or a `QuireError` that says with numbers why not."""
        tokens = self._checked_prompt(prompt)
        sampling = row_sampling(
            params,
            vocab_size=self.vocab_size,
            end_ids=self.end_ids,
            bad_words=bad_words,
            fresh_seed=fresh_seed,
        )
        max_tokens = self._completion_length(len(tokens), params)
        return Request(request_id, tokens, max_tokens, sampling, params.n)

    def _checked_prompt(self, prompt: Sequence[int]) -> IntArray:
        if len(prompt) == 0:
            raise InvalidPrompt("The prompt is empty; it needs at least one token.", param="prompt")
        if len(prompt) >= self.max_length:
            raise ContextLengthExceeded(self.max_length, len(prompt), 1)
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise InvalidPrompt(f"The prompt holds {shown(token)}, which is no token id.", param="prompt")
            if not 0 <= token < self.vocab_size:
                raise InvalidPrompt(
                    f"The prompt holds token id {shown(int(token))}, but this model's ids run from 0 to "
                    f"{self.vocab_size - 1}.",
                    param="prompt",
                )
        return np.array(prompt, dtype=np.int32)

    def _completion_length(self, num_prompt: int, params: SamplingParams) -> int:
        """What was asked for, if it can ever fit; what fits, if nothing was asked for."""
        if params.max_tokens is None:
            longest = min(self.max_length, self.num_blocks * self.block_size + 1) - num_prompt
            if longest < 1:
                self._refuse(num_prompt, 1)
            if params.min_tokens > longest:
                raise InvalidParameter(
                    f"min_tokens is {params.min_tokens}, but only {longest} tokens fit after this prompt.",
                    param="min_tokens",
                )
            return longest
        if num_prompt + params.max_tokens > self.max_length:
            raise ContextLengthExceeded(self.max_length, num_prompt, params.max_tokens)
        self._refuse(num_prompt, params.max_tokens)
        return params.max_tokens

    def _refuse(self, num_prompt: int, num_completion: int) -> None:
        """Raise if so many tokens would not fit an empty pool. The last token of all is never computed."""
        num_positions = num_prompt + num_completion - 1
        needed = count_blocks(num_positions, self.block_size)
        if needed > self.num_blocks:
            raise NeverFits(num_positions, needed, self.num_blocks, self.block_size)
