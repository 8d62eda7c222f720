"""Request validator: rejects requests that could raise in the engine or never fit in the cache.

Every request is validated here, in one place, against the model and the block pool, whatever was checked before.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.core.errors import ContextLengthExceeded, InvalidParameter, InvalidPrompt, NeverFits, shown
from quire.core.ids import IntArray, RequestId
from quire.core.request import BeamParams, EarlyStopping, Request
from quire.core.sampling import SamplingParams, row_sampling
from quire.engine.messages import AddRequest
from quire.sched.beam_search import BeamSearch
from quire.sched.reservation import most_blocks

_EARLY_STOPPING = {
    True: EarlyStopping.WHEN_FULL,
    False: EarlyStopping.WHEN_UNLIKELY,
    "never": EarlyStopping.NEVER,
}


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """The limits of one engine."""

    vocab_size: int  # the width of the logits
    end_ids: tuple[int, ...]
    max_length: int
    max_rows: int
    num_blocks: int
    block_size: int

    def admit(self, message: AddRequest, fresh_seed: int, now_s: float = 0.0) -> Request:
        """A valid request, or a `QuireError` that says with numbers why not."""
        params, options = message.params, message.options
        tokens = self._checked_prompt(message.prompt, 0 if message.prompt_alone else params.max_tokens or 1)
        self._check_rows(params)
        sampling = row_sampling(
            params,
            vocab_size=self.vocab_size,
            end_ids=self.end_ids,
            bad_words=message.bad_words,
            fresh_seed=fresh_seed,
        )
        request = Request(
            RequestId(message.number),
            tokens,
            max_tokens=1 if message.prompt_alone else params.max_tokens or 1,
            sampling=replace(sampling, pooled=True) if message.pooled else sampling,
            num_sequences=params.num_sequences,
            beam=_beam(params),
            partition=options.partition,
            tenant=options.client or options.tenant,
            priority=options.priority,
            deadline_s=options.deadline_s(now_s),
        )
        return self._with_candidates(self._with_length(request, params, prompt_alone=message.prompt_alone))

    def _checked_prompt(self, prompt: Sequence[int], num_after: int) -> IntArray:
        if len(prompt) == 0:
            raise InvalidPrompt("The prompt is empty; it needs at least one token.", param="prompt")
        if len(prompt) + num_after > self.max_length:
            param = "max_tokens" if len(prompt) < self.max_length else "messages"  # what a client has to reduce
            raise ContextLengthExceeded(self.max_length, len(prompt), num_after, param=param)
        plain = set(map(type, prompt)) == {int}  # the common case: no check of each token
        if not plain or min(prompt) < 0 or max(prompt) >= self.vocab_size:
            self._check_ids(prompt)
        return np.array(prompt, dtype=np.int32)

    def _check_ids(self, prompt: Sequence[int]) -> None:
        for token in prompt:
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise InvalidPrompt(f"The prompt has {shown(token)}, which is not a token id.", param="prompt")
            if not 0 <= token < self.vocab_size:
                raise InvalidPrompt(
                    f"The prompt has token id {shown(int(token))}, but this model's ids run from 0 to "
                    f"{self.vocab_size - 1}.",
                    param="prompt",
                )

    def _check_rows(self, params: SamplingParams) -> None:
        if params.num_sequences <= self.max_rows:
            return
        name = "beam_width" if params.use_beam_search else "best_of" if params.chooses else "n"
        raise InvalidParameter(
            f"This request runs {params.num_sequences} sequences at once ({name}), but this engine runs "
            f"{self.max_rows} in all; ask for fewer, or start it with --max-num-seqs {params.num_sequences}.",
            param=name,
        )

    def _with_length(self, request: Request, params: SamplingParams, *, prompt_alone: bool) -> Request:
        """With the requested length, if the cache can ever hold it; with the length that fits, if none was given."""
        needed = most_blocks(request, self.block_size)
        if needed > self.num_blocks:
            longest = request.max_length - 1  # the last token of all is never computed
            raise NeverFits(longest, needed, self.num_blocks, self.block_size, request.num_sequences)
        if prompt_alone or params.max_tokens is not None:
            return request
        lengths = range(1, self.max_length - len(request.prompt) + 1)
        longest = bisect_right(lengths, self.num_blocks, key=lambda length: self._most_blocks(request, length))
        if params.min_tokens > longest:
            raise InvalidParameter(
                f"min_tokens is {params.min_tokens}, but only {longest} tokens fit after this prompt.",
                param="min_tokens",
            )
        return replace(request, max_tokens=longest)

    def _most_blocks(self, request: Request, max_tokens: int) -> int:
        """Blocks of the whole request group: the prompt once, each sequence separately."""
        return most_blocks(replace(request, max_tokens=max_tokens), self.block_size)

    def _with_candidates(self, request: Request) -> Request:
        """Each beam returns as many candidates as the search may need."""
        if request.beam is None:
            return request
        ends = request.sampling.end_ids
        search = BeamSearch(request.beam, len(request.prompt), request.max_length, ends)
        count = min(search.num_candidates, self.vocab_size)
        return replace(request, sampling=replace(request.sampling, num_candidates=count))


def _beam(params: SamplingParams) -> BeamParams | None:
    if not params.use_beam_search:
        return None
    stopping = _EARLY_STOPPING[params.early_stopping]
    return BeamParams(params.num_sequences, float(params.length_penalty), stopping, params.n)
