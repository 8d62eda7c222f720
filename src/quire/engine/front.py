"""The front: owns text. Turns prompts into ids, absorbed tokens into text, and stop strings into orders to stop."""

from collections.abc import Mapping, Sequence

from quire.core.errors import InvalidParameter, InvalidPrompt, NoTokenizer, shown
from quire.core.ids import SequenceId
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, PromptLogprobs
from quire.engine.engine import Engine
from quire.engine.outputs import Delta, Logprob, RequestMetrics
from quire.engine.terms import USUAL, Terms
from quire.engine.ticket import Ticket
from quire.engine.transcript import Transcript, logprob_entry
from quire.sched.scheduler import Absorbed
from quire.text.stop import StopStrings
from quire.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, object] | Sequence[int]


def as_list(ids: object) -> object:
    """A numpy array or a tensor as the list it stands for; anything else as it is."""
    return ids.tolist() if hasattr(ids, "tolist") else ids


class Front:
    """Text in, text out, over one engine."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._transcripts: dict[SequenceId, Transcript] = {}
        self._tickets: dict[SequenceId, Ticket] = {}
        self._awaiting_first: set[SequenceId] = set()  # no token yet
        self._choosing: set[str] = set()  # requests whose continuations are compared at the end
        self._num_listening = 0

    def submit(
        self, prompt: Prompt, params: SamplingParams, *, terms: Terms = USUAL, streaming: bool = False
    ) -> Ticket:
        """Queue a prompt: text, token ids, or {"prompt_token_ids": ids}."""
        if not isinstance(params, SamplingParams):
            raise InvalidParameter(
                f"sampling_params must be a SamplingParams, not {shown(params)}.", param="sampling_params"
            )
        text, ids = self.encode(prompt)
        if params.stop_strings and self._tokenizer is None:
            raise NoTokenizer("use stop_token_ids instead of stop strings")
        stop_strings = StopStrings(params.stop_strings)
        family = self._engine.submit(ids, params, self._spell(params.bad_words or ()), terms)
        request_id = str(family.request.id)
        try:
            transcripts = tuple(
                Transcript(request_id, each, params, self._tokenizer, stop_strings=stop_strings, streaming=streaming)
                for each in family.answers
            )
        except BaseException:
            self._engine.abort(family.request.id)
            raise
        metrics = RequestMetrics(family.arrived_s, self._engine.scheduler.books.last_absorbed + 1)
        scores: list[dict[int, Logprob] | None] | None = None
        if params.prompt_logprobs is not None:
            scores = [None] * len(ids)
        ticket = Ticket(request_id, text, ids, params, family, metrics, transcripts, scores)
        if params.chooses:
            self._choosing.add(request_id)
        for transcript in transcripts:
            self._transcripts[transcript.sequence.id] = transcript
            self._tickets[transcript.sequence.id] = ticket
            self._awaiting_first.add(transcript.sequence.id)
            self._num_listening += transcript.listening
        return ticket

    def abort(self, ticket: Ticket) -> None:
        """Give up a request; what it has so far stays readable."""
        self._engine.abort(ticket.family.request.id)
        for transcript in ticket.transcripts:
            if transcript.finish_reason is None:
                self._close(transcript, FinishReason.ABORT)
        self._choosing.discard(ticket.request_id)

    def turn(self) -> list[Delta]:
        """One turn of the engine; what each who listens gained by it, and each who finished."""
        absorbed = self._engine.turn()
        return [] if absorbed is None else self._read(absorbed)

    @property
    def idle(self) -> bool:
        return self._engine.idle

    def now(self) -> float:
        """The clock that metrics are read on, in seconds."""
        return self._engine.clock()

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it came as text, and its ids."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise NoTokenizer('give {"prompt_token_ids": [...]} instead of text')
            return prompt, self._tokenizer.encode(prompt)
        if isinstance(prompt, Mapping):
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
        if isinstance(ids, Sequence) and not isinstance(ids, str | bytes):
            return None, [*ids]
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

    def _read(self, absorbed: Absorbed) -> list[Delta]:
        deltas: dict[SequenceId, Delta] = {}
        if self._awaiting_first:
            self._note_first_tokens(absorbed)
        for sequence_id, scores in absorbed.prompt_logprobs.items():
            if sequence_id in self._tickets:  # a beam that nobody listens to may compute the prompt again
                self._note_prompt_logprobs(self._tickets[sequence_id], scores)
        ended = self._ended(absorbed)
        if self._num_listening:
            for number, token in zip(absorbed.sequences.tolist(), absorbed.tokens.tolist(), strict=True):
                sequence_id = SequenceId(number)
                transcript = self._transcripts[sequence_id]
                if not transcript.listening:
                    continue
                scored = absorbed.logprobs.get(sequence_id)
                deltas[sequence_id] = transcript.push(token, scored, ended.get(sequence_id))
                if transcript.stopped and sequence_id not in ended:
                    self._engine.stop(transcript.sequence)
                    ended[sequence_id] = FinishReason.STOP
        tickets = {self._tickets[sequence_id].request_id: self._tickets[sequence_id] for sequence_id in ended}
        for sequence_id, reason in ended.items():
            last = self._close(self._transcripts[sequence_id], reason)
            deltas[sequence_id] = deltas[sequence_id].then(last) if sequence_id in deltas else last
        return self._told(deltas, tickets)

    def _ended(self, absorbed: Absorbed) -> dict[SequenceId, FinishReason]:
        """Who ended, of those who are listened to. Beams end together, those without a result too."""
        ended: dict[SequenceId, FinishReason] = {}
        for sequence in absorbed.finished:
            family = sequence.family
            for member in (sequence,) if family.request.beam is None else family.answers:
                if member.id in self._transcripts and member.finish_reason is not None:
                    ended[member.id] = member.finish_reason
        return ended

    def _told(self, deltas: dict[SequenceId, Delta], ended: Mapping[str, Ticket]) -> list[Delta]:
        """What callers hear now: of continuations that are compared nothing, until all of them have ended."""
        if not self._choosing:
            return list(deltas.values())
        told = [delta for delta in deltas.values() if delta.request_id not in self._choosing]
        for request_id, ticket in ended.items():
            if request_id in self._choosing and ticket.finished:
                self._choosing.discard(request_id)
                told.extend(ticket.last_words())
        return told

    def _close(self, transcript: Transcript, reason: FinishReason) -> Delta:
        delta = transcript.close(reason)
        sequence = transcript.sequence
        del self._transcripts[sequence.id]
        self._awaiting_first.discard(sequence.id)
        self._num_listening -= transcript.listening
        ticket = self._tickets.pop(sequence.id)
        if ticket.finished:
            self._note_end(ticket)
        return delta

    def _note_end(self, ticket: Ticket) -> None:
        metrics, family = ticket.metrics, ticket.family
        metrics.finished_s = self.now()
        metrics.finished_step = self._engine.scheduler.books.last_absorbed
        metrics.seated_s = family.seated_s
        metrics.num_preemptions = family.num_preemptions
        metrics.num_cached_tokens = family.num_cached
        if family.request.beam is not None:
            metrics.first_token_s = metrics.finished_s

    def _note_first_tokens(self, absorbed: Absorbed) -> None:
        for number in absorbed.sequences.tolist():
            sequence_id = SequenceId(number)
            if sequence_id in self._awaiting_first:
                self._awaiting_first.discard(sequence_id)
                metrics = self._tickets[sequence_id].metrics
                if metrics.first_token_s is None:
                    metrics.first_token_s = self.now()

    def _note_prompt_logprobs(self, ticket: Ticket, scored: PromptLogprobs) -> None:
        assert ticket.prompt_logprobs is not None, ticket.request_id
        for offset, scores in enumerate(scored.scores):
            ticket.prompt_logprobs[scored.start + offset] = logprob_entry(scores, self._tokenizer)
