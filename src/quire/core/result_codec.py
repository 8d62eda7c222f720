"""Step results as bytes, for rank 0 of a pipeline: the last stage samples, and sends what it found.

Typed by hand with `core/codec.py`, as plans are. To the stages between, rank 0 passes on no more than they need.
"""

from typing import NamedTuple

import numpy as np

from quire.core.codec import RecordDecoder, RecordEncoder, UnreadableRecord
from quire.core.ids import FloatArray, IntArray, Row
from quire.core.step import (
    Candidates,
    FinishedRow,
    FinishReason,
    PromptLogprobs,
    StepResult,
    TopLogprobs,
    Verified,
)

_REASONS = tuple(FinishReason)
_NO_ROWS: IntArray = np.empty(0, dtype=np.int32)


class RowOutcome(NamedTuple):
    """What the row table of a stage needs of a result: the token of each row, and the rows that ended."""

    rows: IntArray
    tokens: IntArray
    ended: IntArray

    @staticmethod
    def of(result: StepResult) -> "RowOutcome":
        ended = np.array([over.row for over in result.ended], dtype=np.int32) if result.ended else _NO_ROWS
        return RowOutcome(result.rows, result.tokens, ended)


def encode_outcome(outcome: RowOutcome) -> bytes:
    encoder = RecordEncoder()
    for numbers in outcome:
        encoder.array(numbers)
    return bytes(encoder.data)


def decode_outcome(data: bytes) -> RowOutcome:
    decoder = RecordDecoder(data)
    return RowOutcome(decoder.integers(), decoder.integers(), decoder.integers())


def encode_result(result: StepResult) -> bytes:
    encoder = RecordEncoder()
    encoder.count(result.step)
    for numbers in (result.rows, result.tokens):
        encoder.array(numbers)
    encoder.array(over.row for over in result.ended)
    encoder.array(_REASONS.index(over.reason) for over in result.ended)
    encoder.array(result.passes)
    verified = result.verified
    for numbers in (verified.rows, verified.drafted, verified.accepted, verified.sources):
        encoder.array(numbers)
    encoder.count(len(result.logprobs))
    for row, scores in result.logprobs.items():
        encoder.count(row)
        _put_scores(encoder, scores)
    encoder.count(len(result.prompt_logprobs))
    for part in result.prompt_logprobs:
        encoder.count(part.row)
        encoder.count(part.start)
        _put_scores(encoder, part.scores)
    encoder.count(len(result.candidates))
    for row, best in result.candidates.items():
        encoder.count(row)
        _put_best(encoder, best.ids, best.logprobs)
    encoder.count(len(result.pooled))
    for row, total in result.pooled.items():
        encoder.count(row)
        encoder.reals(total)
    return bytes(encoder.data)


def decode_result(data: bytes) -> StepResult:
    """Raises `UnreadableRecord`."""
    decoder = RecordDecoder(data)
    result = StepResult(
        step=decoder.count(),
        rows=decoder.integers(),
        tokens=decoder.integers(),
        ended=_ended(decoder),
        passes=tuple(decoder.array().tolist()),
        verified=Verified(*(decoder.integers() for _ in range(4))),
        logprobs={Row(decoder.count()): _scores(decoder) for _ in range(decoder.count())},
        prompt_logprobs=tuple(
            PromptLogprobs(Row(decoder.count()), decoder.count(), _scores(decoder)) for _ in range(decoder.count())
        ),
        candidates={Row(decoder.count()): Candidates(*_best(decoder)) for _ in range(decoder.count())},
        pooled={Row(decoder.count()): decoder.reals() for _ in range(decoder.count())},
    )
    if not decoder.at_end:
        raise UnreadableRecord(f"bytes are left behind a result, from {decoder.position} on")
    return result


def _put_scores(encoder: RecordEncoder, scores: tuple[TopLogprobs, ...]) -> None:
    encoder.count(len(scores))
    for score in scores:
        encoder.count(score.token)
        encoder.real(score.logprob)
        encoder.count(score.rank)
        _put_best(encoder, score.ids, score.logprobs)


def _scores(decoder: RecordDecoder) -> tuple[TopLogprobs, ...]:
    return tuple(
        TopLogprobs(decoder.count(), decoder.real(), decoder.count(), *_best(decoder)) for _ in range(decoder.count())
    )


def _put_best(encoder: RecordEncoder, ids: IntArray, logprobs: FloatArray) -> None:
    encoder.array(ids)
    encoder.reals(logprobs)


def _best(decoder: RecordDecoder) -> tuple[IntArray, FloatArray]:
    return decoder.integers(), decoder.reals()


def _ended(decoder: RecordDecoder) -> tuple[FinishedRow, ...]:
    rows, reasons = decoder.array().tolist(), decoder.array().tolist()
    return tuple(FinishedRow(Row(row), _REASONS[reason]) for row, reason in zip(rows, reasons, strict=True))
