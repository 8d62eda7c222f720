"""Output processor: tokenizes prompts, detokenizes step outputs, finds stop strings. Owns the text of all requests.

Does not depend on the engine: a client passes the messages between the two. Not thread-safe.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

from quire.core.errors import InvalidParameter, InvalidPrompt, NoTokenizer, shown
from quire.core.fault_injection import FaultSite, trip
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, PromptLogprobs, TopLogprobs
from quire.core.step_output import FinishedSequence, FirstToken, StepOutput
from quire.engine.messages import DEFAULT_OPTIONS, Accepted, AddRequest, RequestOptions, StopSequence
from quire.engine.outputs import Delta, Logprob, RequestMetrics, unit
from quire.engine.request_state import RequestState, SequenceOutput, logprob_entry
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Prompt = str | Mapping[str, object] | Sequence[int]


class ProcessedOutput(NamedTuple):
    """The deltas of a step, and the sequences that the engine must stop."""

    deltas: list[Delta]
    stops: list[StopSequence]
    finished: list[RequestState]  # with their last deltas among these


def as_list(ids: object) -> object:
    """A numpy array or a tensor as a list; anything else unchanged."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


class OutputProcessor:
    """Text in, text out."""

    def __init__(
        self, tokenizer: Tokenizer | None, clock: Callable[[], float], first_number: int = 0, stride: int = 1
    ) -> None:
        self.now = clock  # metrics are read on it, in seconds
        self._tokenizer = tokenizer
        self._next_number = first_number  # of a request; the numbers of several processors never meet
        self._stride = stride
        self._requests: dict[int, RequestState] = {}
        self._sequences: dict[int, SequenceOutput] = {}  # by sequence, as the engine numbers them
        self._sequence_ids: dict[int, tuple[int, ...]] = {}  # of each request that the engine has accepted
        self._choosing: set[int] = set()  # requests whose continuations are compared at the end
        self._num_incremental = 0

    def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        options: RequestOptions = DEFAULT_OPTIONS,
        streaming: bool = False,
        pooled: bool = False,
        without_tokens: bool = False,
        routing: str = "",
    ) -> RequestState:
        """Start a request for a prompt: text, token ids, or {"prompt_token_ids": ids}. Its `request` is to be sent to
        the engine. The keywords are those of `SubmitOptions`."""
        if not isinstance(params, SamplingParams):
            raise InvalidParameter(
                f"sampling_params must be a SamplingParams, not {shown(params)}.", param="sampling_params"
            )
        text, ids = self.encode(prompt)
        if params.stop_strings and self._tokenizer is None:
            raise NoTokenizer("use stop_token_ids instead of stop strings")
        number = self._next_number
        bad_words = tuple(self._spell(params.bad_words or ()))
        request = AddRequest(number, ids, params, bad_words, options, pooled, without_tokens, routing=routing)
        stop_strings = StopStrings(params.stop_strings)
        num_sequences = params.n if params.use_beam_search else params.num_sequences
        sequences = tuple(
            SequenceOutput(
                str(number),
                index,
                params,
                self._tokenizer,
                prompt_ids=ids,
                stop_strings=stop_strings,
                streaming=streaming,
            )
            for index in range(num_sequences)
        )
        scores: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            scores = [None] * len(ids)
        state = RequestState(request, text, RequestMetrics(self.now(), 0), sequences, scores)
        self._next_number += self._stride
        self._requests[number] = state
        if params.chooses:
            self._choosing.add(number)
        return state

    def accept(self, accepted: Accepted) -> None:
        """The engine has queued a request. It may have been dropped since."""
        state = self._requests.get(accepted.number)
        if state is None:
            return
        state.metrics.arrival_step = accepted.step
        names = range(accepted.first_sequence, accepted.first_sequence + len(state.sequences))
        self._sequence_ids[accepted.number] = tuple(names)
        for name, sequence in zip(names, state.sequences, strict=True):
            self._sequences[name] = sequence
            self._num_incremental += sequence.incremental

    def drop(self, state: RequestState) -> None:
        """Give up a request, in any state; what it has so far stays readable. Its AddRequest was
        rejected, or must be aborted."""
        for sequence in state.sequences:
            if sequence.finish_reason is None:
                sequence.close(FinishReason.ABORT)
        if self._requests.pop(state.number, None) is not None:
            state.metrics.finished_s = self.now()
            for name in self._sequence_ids.pop(state.number, ()):
                self._forget(name)
        self._choosing.discard(state.number)

    def process(self, output: StepOutput) -> ProcessedOutput:
        """The output of a step as text. Sequences of dropped requests are ignored."""
        if not self._num_incremental and output.only_tokens:  # texts that are made at the end
            return ProcessedOutput([], [], [])
        for first in output.first_tokens:
            self._note_first_token(first)
        for name, scores in output.prompt_logprobs.items():
            if name in self._sequences:
                self._note_prompt_logprobs(name, scores)
        for name, total in output.pooled.items():
            if name in self._sequences:
                self._requests[int(self._sequences[name].request_id)].embedding = unit(total)
        for name, drafts in output.drafts.items():
            if name in self._sequences:
                metrics = self._requests[int(self._sequences[name].request_id)].metrics
                metrics.num_drafted_tokens += drafts.drafted
                metrics.num_accepted_tokens += drafts.accepted
        deltas: dict[int, Delta] = {}
        stops: list[StopSequence] = []
        ended = {over.sequence: over for over in output.finished if over.sequence in self._sequences}
        closed: list[int] = []
        if self._num_incremental:
            self._push_tokens(output, ended, deltas)
            for name, delta in deltas.items():
                if name not in ended and delta.finish_reason is not None:  # a stop string, or detokenization failed
                    stops.append(StopSequence(int(delta.request_id), self._sequences[name].index))
                    closed.append(name)
        for name, over in ended.items():
            last = self._sequences[name].end(over)
            deltas[name] = deltas[name].then(last) if name in deltas else last
            self._requests[over.number].metrics.num_preemptions = over.num_preemptions
            closed.append(name)
        finished = self._settle({int(deltas[name].request_id) for name in closed}, output.step)
        for name in closed:
            self._forget(name)
        return ProcessedOutput(self._deliverable(deltas, finished), stops, finished)

    def _push_tokens(self, output: StepOutput, ended: Mapping[int, FinishedSequence], deltas: dict[int, Delta]) -> None:
        """The tokens of sequences that are processed one by one. What comes behind a stop string is dropped."""
        names = output.sequences.tolist()
        left = Counter(names)
        for name, token in zip(names, output.tokens.tolist(), strict=True):
            left[name] -= 1
            sequence = self._sequences.get(name)
            if sequence is None or not sequence.incremental or sequence.finish_reason is not None:
                continue
            scores = output.logprobs.get(name)
            over = ended.get(name) if left[name] == 0 else None
            delta = self._push_token(sequence, token, None if scores is None else scores[-1 - left[name]], over)
            deltas[name] = deltas[name].then(delta) if name in deltas else delta

    def _push_token(
        self, sequence: SequenceOutput, token: int, scores: TopLogprobs | None, over: FinishedSequence | None
    ) -> Delta:
        """One more token of a sequence. A detokenization error fails only this sequence."""
        try:
            trip(FaultSite.STOP_CHECK, int(sequence.request_id))
            delta = sequence.push(token, scores, over)
            if sequence.stopped and over is None:
                delta = delta.then(sequence.close(FinishReason.STOP))
        except Exception:
            _log.exception("detokenization of request %s failed", sequence.request_id)
            return sequence.fail()
        return delta

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it came as text, and its ids."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise NoTokenizer('give {"prompt_token_ids": [...]} instead of text')
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            images = prompt.get("multi_modal_data")
            if images is not None and not (isinstance(images, Mapping) and len(images) == 0):
                raise InvalidPrompt("This model accepts text only; omit multi_modal_data.", param="prompt")
            ids = prompt.get("prompt_token_ids")
            if ids is None and isinstance(prompt.get("prompt"), str):
                return self.encode(str(prompt["prompt"]))
            if ids is None:
                keys = ", ".join(map(repr, prompt)) or "nothing"
                raise InvalidPrompt(
                    f'A prompt given as a mapping needs "prompt_token_ids" (a list of ids) or "prompt" (a text); '
                    f"this one has {keys}.",
                    param="prompt",
                )
            return self._ids(ids)
        return self._ids(prompt)

    def _ids(self, prompt: object) -> tuple[None, list[int]]:
        ids = as_list(prompt)
        if isinstance(ids, Sequence) and not isinstance(ids, str | bytes | bytearray):
            if set(map(type, ids)) <= {int}:  # the common case: no check of each token
                return None, [*ids]
            odd = [token for token in ids if not isinstance(token, Integral)]
            if not odd:
                return None, [*ids]
            raise InvalidPrompt(
                f"The prompt has {shown(odd[0])}, which is not a token id. A prompt is one text or a list of ids; "
                f"several go together as a list of prompts.",
                param="prompt",
            )
        raise InvalidPrompt(f"A prompt is a text or token ids, not {type(prompt).__name__}.", param="prompt")

    def _spell(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Both tokenizations of a bad word: at the start of a text and after a space."""
        if words and self._tokenizer is None:
            raise NoTokenizer("use logit_bias instead of bad_words")
        spellings: set[tuple[int, ...]] = set()
        for word in words:
            assert self._tokenizer is not None
            bare = word.lstrip(" ")
            for form in (bare, " " + bare):
                spellings.add(tuple(self._tokenizer.encode(form, add_special_tokens=False)))
        return sorted(spellings)

    def _settle(self, numbers: set[int], step: int) -> list[RequestState]:
        """Those of these requests that are finished now."""
        finished = [state for number in numbers if (state := self._requests[number]).finished]
        for state in finished:
            del self._requests[state.number], self._sequence_ids[state.number]
            state.metrics.finished_s = self.now()
            state.metrics.finished_step = step
            if state.params.use_beam_search:
                state.metrics.first_token_s = state.metrics.finished_s
        return finished

    def _deliverable(self, deltas: Mapping[int, Delta], finished: Sequence[RequestState]) -> list[Delta]:
        """The deltas to deliver now: of sequences that are compared (best_of, beams) none before all have finished."""
        if not self._choosing:
            return list(deltas.values())
        delivered = [delta for delta in deltas.values() if int(delta.request_id) not in self._choosing]
        for state in finished:
            if state.number in self._choosing:
                self._choosing.discard(state.number)
                delivered.extend(state.final_deltas())
        return delivered

    def _forget(self, name: int) -> None:
        sequence = self._sequences.pop(name, None)
        if sequence is not None:
            self._num_incremental -= sequence.incremental

    def _note_first_token(self, first: FirstToken) -> None:
        state = self._requests.get(first.number)
        if state is not None and state.metrics.first_token_s is None:
            state.metrics.first_token_s = self.now()
            state.metrics.seated_s = first.seated_s
            state.metrics.num_cached_tokens = max(first.num_cached - state.num_copied, 0)

    def _note_prompt_logprobs(self, name: int, scored: PromptLogprobs) -> None:
        state = self._requests[int(self._sequences[name].request_id)]
        assert state.prompt_logprobs is not None, state.request_id
        for offset, scores in enumerate(scored.scores):
            state.prompt_logprobs[scored.start + offset] = logprob_entry(scores, self._tokenizer)
