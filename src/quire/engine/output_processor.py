"""The front: owns text. Turns prompts into orders, the engine's words into text, and stop strings into orders to stop.

Knows no engine: whoever holds both carries the words from one to the other. Not safe for several threads at once.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import NamedTuple

from quire.core.errors import InvalidParameter, InvalidPrompt, NoTokenizer, shown
from quire.core.fault_injection import FaultSite, trip
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, PromptLogprobs, TopLogprobs
from quire.core.step_output import FinishedSequence, FirstToken, StepOutput
from quire.engine.messages import Accepted, AddRequest, StopSequence
from quire.engine.outputs import Delta, Logprob, RequestMetrics, unit
from quire.engine.request_options import USUAL, RequestOptions
from quire.engine.request_state import RequestState, SequenceOutput, logprob_entry
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

Prompt = str | Mapping[str, object] | Sequence[int]


class ProcessedOutput(NamedTuple):
    """What each who listens gained, and each who finished; and what the engine must be told."""

    deltas: list[Delta]
    stops: list[StopSequence]
    finished: list[RequestState]  # whose last words are among these deltas


def as_list(ids: object) -> object:
    """A numpy array or a tensor as the list it stands for; anything else as it is."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


class OutputProcessor:
    """Text in, text out."""

    def __init__(self, tokenizer: Tokenizer | None, clock: Callable[[], float]) -> None:
        self.now = clock  # metrics are read on it, in seconds
        self._tokenizer = tokenizer
        self._next_number = 0
        self._tickets: dict[int, RequestState] = {}
        self._transcripts: dict[int, SequenceOutput] = {}  # by sequence, as the engine numbers them
        self._sequences: dict[int, tuple[int, ...]] = {}  # of each request that the engine has accepted
        self._choosing: set[int] = set()  # requests whose continuations are compared at the end
        self._num_listening = 0

    def open(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        terms: RequestOptions = USUAL,
        streaming: bool = False,
        pooled: bool = False,
        without_tokens: bool = False,
    ) -> RequestState:
        """Start a request for a prompt: text, token ids, or {"prompt_token_ids": ids}. Its `request` is to be sent to
        the engine. `pooled`: its output is an embedding. `without_tokens`: its output is the prompt's scores."""
        if not isinstance(params, SamplingParams):
            raise InvalidParameter(
                f"sampling_params must be a SamplingParams, not {shown(params)}.", param="sampling_params"
            )
        text, ids = self.encode(prompt)
        if params.stop_strings and self._tokenizer is None:
            raise NoTokenizer("use stop_token_ids instead of stop strings")
        number = self._next_number
        bad_words = tuple(self._spell(params.bad_words or ()))
        order = AddRequest(number, ids, params, bad_words, terms, pooled, without_tokens)
        stop_strings = StopStrings(params.stop_strings)
        num_answers = params.n if params.use_beam_search else params.num_sequences
        transcripts = tuple(
            SequenceOutput(
                str(number),
                index,
                params,
                self._tokenizer,
                prompt_ids=ids,
                stop_strings=stop_strings,
                streaming=streaming,
            )
            for index in range(num_answers)
        )
        scores: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            scores = [None] * len(ids)
        ticket = RequestState(order, text, RequestMetrics(self.now(), 0), transcripts, scores)
        self._next_number += 1
        self._tickets[number] = ticket
        if params.chooses:
            self._choosing.add(number)
        return ticket

    def accept(self, accepted: Accepted) -> None:
        """The engine has queued a request. Whoever opened it may have dropped it since."""
        ticket = self._tickets.get(accepted.number)
        if ticket is None:
            return
        ticket.metrics.arrival_step = accepted.step
        names = range(accepted.first_sequence, accepted.first_sequence + len(ticket.transcripts))
        self._sequences[accepted.number] = tuple(names)
        for name, transcript in zip(names, ticket.transcripts, strict=True):
            self._transcripts[name] = transcript
            self._num_listening += transcript.listening

    def drop(self, ticket: RequestState) -> None:
        """Give up a request, in any state; what it has so far stays readable. Its order was refused, or must be
        aborted."""
        for transcript in ticket.transcripts:
            if transcript.finish_reason is None:
                transcript.close(FinishReason.ABORT)
        if self._tickets.pop(ticket.number, None) is not None:
            ticket.metrics.finished_s = self.now()
            for name in self._sequences.pop(ticket.number, ()):
                self._forget(name)
        self._choosing.discard(ticket.number)

    def hear(self, progress: StepOutput) -> ProcessedOutput:
        """What a turn of the engine means to those who wait. Sequences that nobody waits for any more are ignored."""
        for begun in progress.first_tokens:
            self._note_first_token(begun)
        for name, scores in progress.prompt_logprobs.items():
            if name in self._transcripts:
                self._note_prompt_logprobs(name, scores)
        for name, total in progress.pooled.items():
            if name in self._transcripts:
                self._tickets[int(self._transcripts[name].request_id)].embedding = unit(total)
        deltas: dict[int, Delta] = {}
        stops: list[StopSequence] = []
        ended = {over.sequence: over for over in progress.finished if over.sequence in self._transcripts}
        closed: list[int] = []
        if self._num_listening:
            for name, token in zip(progress.sequences.tolist(), progress.tokens.tolist(), strict=True):
                transcript = self._transcripts.get(name)
                if transcript is None or not transcript.listening:
                    continue
                over = ended.get(name)
                delta = self._said(transcript, token, progress.logprobs.get(name), over)
                deltas[name] = delta
                if over is None and delta.finish_reason is not None:  # its stop string came, or its text broke
                    stops.append(StopSequence(int(delta.request_id), transcript.index))
                    closed.append(name)
        for name, over in ended.items():
            last = self._transcripts[name].end(over)
            deltas[name] = deltas[name].then(last) if name in deltas else last
            self._tickets[over.number].metrics.num_preemptions = over.num_preemptions
            closed.append(name)
        finished = self._settle({int(deltas[name].request_id) for name in closed}, progress.step)
        for name in closed:
            self._forget(name)
        return ProcessedOutput(self._told(deltas, finished), stops, finished)

    def _said(
        self, transcript: SequenceOutput, token: int, scores: TopLogprobs | None, over: FinishedSequence | None
    ) -> Delta:
        """One more token of a continuation. Whatever goes wrong with its text is its own end alone."""
        try:
            trip(FaultSite.STOP_CHECK, int(transcript.request_id))
            delta = transcript.push(token, scores, over)
            if transcript.stopped and over is None:
                delta = delta.then(transcript.close(FinishReason.STOP))
        except Exception:
            _log.exception("request %s broke its own text", transcript.request_id)
            return transcript.fail()
        return delta

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it came as text, and its ids."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise NoTokenizer('give {"prompt_token_ids": [...]} instead of text')
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
            pictures = prompt.get("multi_modal_data")
            if pictures is not None and not (isinstance(pictures, Mapping) and len(pictures) == 0):
                raise InvalidPrompt("This model reads text only; leave multi_modal_data away.", param="prompt")
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
            if set(map(type, ids)) <= {int}:  # as nearly always, and then there is no need to look at each
                return None, [*ids]
            odd = [token for token in ids if not isinstance(token, Integral)]
            if not odd:
                return None, [*ids]
            raise InvalidPrompt(
                f"The prompt holds {shown(odd[0])}, which is no token id. A prompt is one text or a list of ids; "
                f"several go together as a list of prompts.",
                param="prompt",
            )
        raise InvalidPrompt(f"A prompt is a text or token ids, not {type(prompt).__name__}.", param="prompt")

    def _spell(self, words: Sequence[str]) -> list[tuple[int, ...]]:
        """Every way a bad word may come: at the start of a text and after a space."""
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
        finished = [ticket for number in numbers if (ticket := self._tickets[number]).finished]
        for ticket in finished:
            del self._tickets[ticket.number], self._sequences[ticket.number]
            ticket.metrics.finished_s = self.now()
            ticket.metrics.finished_step = step
            if ticket.params.use_beam_search:
                ticket.metrics.first_token_s = ticket.metrics.finished_s
        return finished

    def _told(self, deltas: Mapping[int, Delta], finished: Sequence[RequestState]) -> list[Delta]:
        """What callers hear now: of continuations that are compared nothing, until all of them have ended."""
        if not self._choosing:
            return list(deltas.values())
        told = [delta for delta in deltas.values() if int(delta.request_id) not in self._choosing]
        for ticket in finished:
            if ticket.number in self._choosing:
                self._choosing.discard(ticket.number)
                told.extend(ticket.last_words())
        return told

    def _forget(self, name: int) -> None:
        transcript = self._transcripts.pop(name, None)
        if transcript is not None:
            self._num_listening -= transcript.listening

    def _note_first_token(self, begun: FirstToken) -> None:
        ticket = self._tickets.get(begun.number)
        if ticket is not None and ticket.metrics.first_token_s is None:
            ticket.metrics.first_token_s = self.now()
            ticket.metrics.seated_s = begun.seated_s
            ticket.metrics.num_cached_tokens = begun.num_cached

    def _note_prompt_logprobs(self, name: int, scored: PromptLogprobs) -> None:
        ticket = self._tickets[int(self._transcripts[name].request_id)]
        assert ticket.prompt_logprobs is not None, ticket.request_id
        for offset, scores in enumerate(scored.scores):
            ticket.prompt_logprobs[scored.start + offset] = logprob_entry(scores, self._tokenizer)
