"""Turns what a step meant to the scheduler into what the front must hear: numbers and tokens, no families."""

from collections.abc import Set

from quire.core.ids import SequenceId
from quire.core.request import Family, Sequence
from quire.core.step import FinishReason
from quire.engine.messages import Begun, Ended, Progress
from quire.sched.scheduler import Absorbed


class Reporter:
    """Knows which continuations the front still waits for; each is reported as ended once."""

    __slots__ = ("_awaiting_first", "_heard")

    def __init__(self) -> None:
        self._heard: dict[SequenceId, Sequence] = {}
        self._awaiting_first: dict[SequenceId, Family] = {}

    def expect(self, family: Family) -> None:
        for member in family.answers:
            self._heard[member.id] = member
            self._awaiting_first[member.id] = family

    def forget(self, sequence: Sequence) -> None:
        """The front ended it itself."""
        self._heard.pop(sequence.id, None)
        self._awaiting_first.pop(sequence.id, None)

    def report(self, absorbed: Absorbed, cornered: Set[SequenceId] = frozenset()) -> Progress:
        """`cornered` are those to which their own requests left no token."""
        begun = self._begun(absorbed) if self._awaiting_first else ()
        heard = self._heard
        scores = {int(name): each for name, each in absorbed.prompt_logprobs.items() if name in heard}
        pooled = {int(name): total for name, total in absorbed.pooled.items() if name in heard}
        logprobs = {int(name): each for name, each in absorbed.logprobs.items()}
        ended = tuple(self._ended(absorbed, cornered))  # last: who has ended is not heard any more
        return Progress(absorbed.step, absorbed.sequences, absorbed.tokens, begun, ended, logprobs, scores, pooled)

    def _begun(self, absorbed: Absorbed) -> tuple[Begun, ...]:
        """Who has a first token now, or an embedding; of siblings, the first counts. Beams have none before the end."""
        begun: dict[int, Begun] = {}
        searched = [sequence.family for sequence in absorbed.finished if sequence.request.beam is not None]
        beams = [member.id for family in searched for member in family.answers]
        for number in (*absorbed.sequences.tolist(), *absorbed.pooled, *beams):
            family = self._awaiting_first.pop(SequenceId(number), None)
            if family is not None:
                begun[family.request.id] = Begun(family.request.id, family.seated_s, family.num_cached)
        return tuple(begun.values())

    def _ended(self, absorbed: Absorbed, cornered: Set[SequenceId]) -> list[Ended]:
        """Beams end together, those without a result too."""
        ended: list[Ended] = []
        for sequence in absorbed.finished:
            family = sequence.family
            for member in (sequence,) if family.request.beam is None else family.answers:
                if member.id in self._heard and member.finish_reason is not None:
                    over = _ended(member)
                    ended.append(over._replace(reason=FinishReason.NOTHING_LEFT) if member.id in cornered else over)
                    self.forget(member)
        return ended


def _ended(sequence: Sequence) -> Ended:
    assert sequence.finish_reason is not None, sequence
    family = sequence.family
    generated = sequence.tokens[len(family.request.prompt) :]
    stopped = sequence.finish_reason is FinishReason.STOP and len(generated) > 0
    return Ended(
        family.request.id,
        sequence.id,
        sequence.finish_reason,
        generated,
        sequence.score,
        family.num_preemptions,
        by_token=stopped and int(generated[-1]) in family.request.sampling.end_ids,
    )
