"""A request under way, for the one who asked: its continuations as far as they have come, the best first if they are
compared."""

from dataclasses import dataclass, replace

from quire.core.ids import FloatArray
from quire.core.sampling import SamplingParams
from quire.engine.outputs import Delta, Logprob, RequestMetrics, RequestOutput
from quire.engine.transcript import Transcript


@dataclass(slots=True)
class Ticket:
    """What the front keeps of one request."""

    number: int
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    metrics: RequestMetrics
    transcripts: tuple[Transcript, ...]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    embedding: FloatArray | None = None

    @property
    def request_id(self) -> str:
        return str(self.number)

    @property
    def finished(self) -> bool:
        return all(transcript.finish_reason is not None for transcript in self.transcripts)

    def output(self) -> RequestOutput:
        """As far as it has come."""
        chosen = self._chosen()
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_ids,
            outputs=[replace(transcript.output(), index=place) for place, transcript in enumerate(chosen)],
            metrics=self.metrics,
            finished=self.finished,
            prompt_logprobs=self.prompt_logprobs,
            embedding=self.embedding,
        )

    def last_words(self) -> list[Delta]:
        """The continuations that were chosen, each as one delta."""
        return [
            Delta(
                request_id=self.request_id,
                index=said.index,
                text=said.text,
                token_ids=said.token_ids,
                finish_reason=said.finish_reason,
                stop_reason=said.stop_reason,
                logprobs=said.logprobs or [],
            )
            for said in self.output().outputs
        ]

    def _chosen(self) -> list[Transcript]:
        """Those that are returned. A search may have found fewer beams than were asked for."""
        everyone = list(self.transcripts)
        if not self.params.chooses or not self.finished:
            return everyone[: self.params.n]
        scored = [transcript for transcript in everyone if transcript.score is not None]
        scored.sort(key=lambda transcript: -(transcript.score or 0.0))
        unscored = [transcript for transcript in everyone if transcript.score is None]
        if self.params.use_beam_search and scored:
            return scored
        return (scored + unscored)[: self.params.n]
