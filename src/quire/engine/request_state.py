"""Request state of the front: the sequences of a request with their tokens, text, log-probabilities and finish reasons.

Sequences that are compared (best_of, beams) are returned best first. Text that is not streamed is decoded once, at the
end: a batch job pays nothing per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from quire.core.ids import FloatArray
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason, TopLogprobs
from quire.core.step_output import FinishedSequence
from quire.engine.messages import AddRequest
from quire.engine.outputs import FAILURES, CompletionOutput, Delta, Logprob, RequestMetrics, RequestOutput, failure_of
from quire.text.detokenizer import SequenceText
from quire.text.stop_strings import StopStrings
from quire.text.tokenizer import Tokenizer


class SequenceOutput:
    """Grows with `push`, ends with `close`."""

    __slots__ = (
        "_beam_score",
        "_cumulative",
        "_keeps_logprobs",
        "_logprobs",
        "_num_prompt",
        "_params",
        "_text",
        "_tokenizer",
        "_unsent",
        "finish_reason",
        "incremental",
        "index",
        "request_id",
        "stop_reason",
        "token_ids",
    )  # fmt: skip

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        *,
        prompt_ids: Sequence[int],
        stop_strings: StopStrings,
        streaming: bool,
    ) -> None:
        self.request_id = request_id
        self._params = params
        self._tokenizer = tokenizer
        self.index = index
        self._num_prompt = len(prompt_ids)
        self.incremental = (streaming and not params.chooses) or bool(stop_strings) or params.scored
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self._cumulative = 0.0 if params.scored else None
        self._beam_score: float | None = None
        self._keeps_logprobs = params.logprobs is not None and (params.chooses or not streaming)
        self._logprobs: list[dict[int, Logprob]] = []  # those of a stream are in its deltas: they take 1 kB a token
        self._unsent: list[dict[int, Logprob]] = []
        self._text = None if tokenizer is None else SequenceText(
            tokenizer,
            stop_strings,
            prompt_ids=prompt_ids,
            skip_special_tokens=params.skip_special_tokens,
            include_stop_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )  # fmt: skip

    def push(self, token: int, scores: TopLogprobs | None, ended: FinishedSequence | None) -> Delta:
        """One more token; with `ended` it is the last one."""
        self.token_ids.append(token)
        if scores is not None and self._cumulative is not None:
            self._cumulative += scores.logprob
        if scores is not None and self._params.logprobs is not None:
            entry = logprob_entry(scores, self._tokenizer)
            self._unsent.append(entry)
            if self._keeps_logprobs:
                self._logprobs.append(entry)
        silent = ended is not None and ended.by_token and not self._params.include_stop_str_in_output
        text = "" if silent else self._append_text([token])
        return self._delta(text, [token])

    def end(self, ended: FinishedSequence) -> Delta:
        """The engine has finished it. The end has all tokens, for sequences that are not processed incrementally."""
        num_read = len(self.token_ids)
        if not self.incremental:
            self.token_ids = ended.tokens.tolist()
            silent = ended.by_token and not self._params.include_stop_str_in_output
            self._append_text(self.token_ids[:-1] if silent else self.token_ids)
        self._beam_score = ended.score
        return self._close(ended.reason, self.token_ids[num_read:])

    def close(self, reason: FinishReason) -> Delta:
        """The front has finished it."""
        return self._close(reason, [])

    def fail(self) -> Delta:
        """Its detokenization failed; further tokens are ignored."""
        self.finish_reason = FinishReason.FAILED
        return self._delta("", [])

    def _close(self, reason: FinishReason, unread: list[int]) -> Delta:
        """No more tokens come. Flushes what was held back, which may complete a stop string."""
        if self.finish_reason is not None:
            return self._delta("", [])
        text = ""
        if self._text is not None:
            rest = self._text.finish()
            text = rest.text
            self.stop_reason = rest.stop
        if self.stopped and reason is FinishReason.LENGTH:  # both in the same token
            reason = FinishReason.STOP
        if reason is FinishReason.STOP and self.stop_reason is None:
            self.stop_reason = self._stop_token()
        self.finish_reason = reason
        return self._delta(text, unread)

    @property
    def stopped(self) -> bool:
        """A stop string matched; the engine has not been notified yet."""
        return isinstance(self.stop_reason, str)

    @property
    def score(self) -> float | None:
        """What continuations are compared by: log-probability per token, as OpenAI's best_of. Beams have their own."""
        if self._params.use_beam_search:
            return self._beam_score
        failed = self.finish_reason in FAILURES or not self.token_ids
        return None if failed or self._cumulative is None else self._cumulative / len(self.token_ids)

    @property
    def _cumulative_logprob(self) -> float | None:
        score = self._beam_score
        return self._cumulative if score is None else score * len(self.token_ids) ** self._params.length_penalty

    def output(self) -> CompletionOutput:
        failure = failure_of(self.finish_reason, self._num_prompt, self._params)
        return CompletionOutput(
            index=self.index,
            text="" if self._text is None else self._text.text,
            token_ids=list(self.token_ids),
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self.stop_reason,
            logprobs=list(self._logprobs) if self._keeps_logprobs else None,
            cumulative_logprob=self._cumulative_logprob,
            score=self.score if self._params.chooses else None,
            error=None if failure is None else failure.message,
        )

    def _append_text(self, tokens: list[int]) -> str:
        if self._text is None:
            return ""
        output = self._text.push(tokens)
        if output.stop is not None:
            self.stop_reason = output.stop
        return output.text

    def _stop_token(self) -> int | None:
        last = self.token_ids[-1] if self.token_ids else None
        return last if last in (self._params.stop_token_ids or ()) else None

    def _delta(self, text: str, token_ids: list[int]) -> Delta:
        logprobs, self._unsent = self._unsent, []
        reason = None if self.finish_reason is None else self.finish_reason.value
        return Delta(self.request_id, self.index, text, token_ids, reason, self.stop_reason, logprobs)


def logprob_entry(scores: TopLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token itself first, then the most probable alternatives."""

    def logprob(token: int, value: float, rank: int) -> Logprob:
        text = None if tokenizer is None else tokenizer.spell(token)
        return Logprob(value, rank, text)

    entry = {scores.token: logprob(scores.token, scores.logprob, scores.rank)}
    for place, (token, value) in enumerate(zip(scores.ids.tolist(), scores.logprobs.tolist(), strict=True)):
        entry.setdefault(token, logprob(token, value, place + 1))
    return entry


@dataclass(slots=True)
class RequestState:
    """What the front keeps of one request."""

    request: AddRequest  # as it is sent to the engine
    prompt: str | None
    metrics: RequestMetrics
    sequences: tuple[SequenceOutput, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    embedding: FloatArray | None = None
    num_copied: int = 0  # tokens of the prompt that a prefill engine computed for this request: found, but not cached

    @property
    def number(self) -> int:
        return self.request.number

    @property
    def request_id(self) -> str:
        return str(self.request.number)

    @property
    def prompt_ids(self) -> list[int]:
        return self.request.prompt

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def finished(self) -> bool:
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """The output so far."""
        chosen = self._chosen()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=[replace(sequence.output(), index=place) for place, sequence in enumerate(chosen)],
            metrics=self.metrics,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            embedding=self.embedding,
        )

    def final_deltas(self) -> list[Delta]:
        """The continuations that were chosen, each as one delta."""
        return [
            Delta(
                request_id=self.request_id,
                index=output.index,
                text=output.text,
                token_ids=output.token_ids,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                logprobs=output.logprobs or [],
            )
            for output in self.output().outputs
        ]

    def _chosen(self) -> list[SequenceOutput]:
        """The sequences to return. A beam search may have found fewer than requested."""
        sequences = list(self.sequences)
        if not self.params.chooses or not self.finished:
            return sequences[: self.params.n]
        scored = [sequence for sequence in sequences if sequence.score is not None]
        scored.sort(key=lambda sequence: -(sequence.score or 0.0))
        unscored = [sequence for sequence in sequences if sequence.score is None]
        if self.params.use_beam_search and scored:
            return scored
        return (scored + unscored)[: self.params.n]
