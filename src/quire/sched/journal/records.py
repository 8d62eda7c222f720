"""What a journal holds: one record for each call that a scheduler got. Knows their bytes, not what they cause.

A journal is MAGIC, one byte of version, the blueprint as a text of JSON, then records: one byte of kind, and the
fields in the order of the classes below, as `sched/journal/codec.py` packs them. Steps are numbered by counting the
plans that were not empty. What cannot be derived by following the plans is written; what can be, is not. Tokens are
written once, when the row that emitted them was left.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from quire.core.ids import FloatArray, IntArray, RequestId, Row, SequenceId
from quire.core.request import BeamParams, EarlyStopping, Request
from quire.core.sampling import RowSampling
from quire.core.step import Candidates, FinishedRow, FinishReason
from quire.sched.journal.codec import RecordDecoder, RecordEncoder, UnreadableRecord

MAGIC = b"quire journal\n"
VERSION = 2

_REASONS = (  # by their numbers in a record: a new one goes to the end
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
    FinishReason.EXPIRED,
    FinishReason.OUT_OF_MEMORY,
    FinishReason.FAILED,
    FinishReason.NOTHING_LEFT,
)
_STOPPINGS = (EarlyStopping.WHEN_FULL, EarlyStopping.WHEN_UNLIKELY, EarlyStopping.NEVER)


class RecordKind(IntEnum):
    """The first byte of a record: numbers are never reused."""

    ARRIVED = 1
    ABORTED = 2
    STOPPED = 3
    DRAINED = 4
    CACHE_RESET = 5
    SHRUNK = 6
    STEPS_LOST = 7
    LARGEST_FAILED = 8
    PLANNED = 9
    RESTED = 10
    ABSORBED = 11
    SPOKEN = 12
    ANSWERED = 13
    ENDED = 14
    CONCLUDED = 15
    FAILED = 16
    RESTRICTED = 17
    WITHDRAWN = 18


class PlanSummary(NamedTuple):
    """A plan in numbers, for people."""

    step: int
    num_decoding: int
    num_chunk_tokens: int
    num_moves: int
    num_leaves: int
    num_seats: int
    num_tells: int
    num_grants: int
    num_chunks: int
    num_pauses: int


class ArrivalRecord(NamedTuple):
    """`add`. Of the sampling, what decisions depend on."""

    request: Request
    now_s: float

    def pack(self, packer: RecordEncoder) -> None:
        request, sampling, beam = self.request, self.request.sampling, self.request.beam
        packer.count(RecordKind.ARRIVED)
        packer.real(self.now_s)
        packer.count(request.id)
        packer.array(request.prompt)
        packer.count(request.max_tokens)
        packer.count(request.num_sequences)
        packer.text(request.partition)
        packer.text(request.tenant)
        packer.signed(request.priority)
        packer.array(sampling.end_ids)
        packer.count(sampling.min_tokens)
        packer.count(sampling.num_candidates)
        scored = sampling.num_prompt_logprobs is not None
        timed, beams = request.deadline_s is not None, beam is not None
        packer.count(scored | timed << 1 | beams << 2 | sampling.masked << 3 | sampling.pooled << 4)
        if request.deadline_s is not None:
            packer.real(request.deadline_s)
        if beam is not None:
            packer.count(beam.width)
            packer.real(beam.length_penalty)
            packer.count(_STOPPINGS.index(beam.early_stopping))
            packer.count(beam.num_returned)


class AbortRecord(NamedTuple):
    """`abort`."""

    request: RequestId

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.ABORTED)
        packer.count(self.request)


class StopRecord(NamedTuple):
    """`finish`: the front ended one sequence."""

    sequence: SequenceId
    reason: FinishReason

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.STOPPED)
        packer.count(self.sequence)
        packer.count(_REASONS.index(self.reason))


class ConcludeRecord(NamedTuple):
    """`conclude`: the engine ended one sequence."""

    sequence: SequenceId
    reason: FinishReason

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.CONCLUDED)
        packer.count(self.sequence)
        packer.count(_REASONS.index(self.reason))


class FailRecord(NamedTuple):
    """`fail`."""

    request: RequestId

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.FAILED)
        packer.count(self.request)


class RestrictRecord(NamedTuple):
    """`admit_only`."""

    orders: frozenset[int] | None

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.RESTRICTED)
        packer.count(self.orders is not None)
        if self.orders is not None:
            packer.array(sorted(self.orders))


class ControlRecord(NamedTuple):
    """`drain`, `reset_cache`, `shrink`, `lose_steps`, `fail_largest` or `withdraw_all`.

    `number`: the blocks; whether to keep.
    """

    kind: RecordKind
    number: int = 0

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(self.kind)
        if self.kind in (RecordKind.SHRUNK, RecordKind.STEPS_LOST):
            packer.count(self.number)


class PlanRecord(NamedTuple):
    """`plan`, and what came of it: nothing, or a plan with this checksum."""

    now_s: float
    cost_version: int
    checksum: int
    summary: PlanSummary | None

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.RESTED if self.summary is None else RecordKind.PLANNED)
        packer.real(self.now_s)
        packer.count(self.cost_version)
        if self.summary is not None:
            packer.data += self.checksum.to_bytes(4, "little")
            for number in self.summary[1:]:
                packer.count(number)


class AbsorbRecord(NamedTuple):
    """`absorb`. Of the result: who ended, the candidates, and the rows that spoke against expectation, or did not."""

    now_s: float
    ended: tuple[FinishedRow, ...]
    surprising: IntArray
    candidates: dict[Row, Candidates]

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.ABSORBED)
        packer.real(self.now_s)
        packer.count(len(self.ended))
        for row, reason in self.ended:
            packer.count(row)
            packer.count(_REASONS.index(reason))
        packer.count(len(self.candidates))
        for row, candidates in self.candidates.items():
            packer.count(row)
            packer.array(candidates.ids)
            packer.reals(candidates.logprobs)
        packer.array(self.surprising)


class TokensRecord(NamedTuple):
    """All that a row emitted from the step it was taken in until it was left."""

    row: Row
    first_step: int
    tokens: IntArray

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.SPOKEN)
        packer.count(self.row)
        packer.count(self.first_step)
        packer.array(self.tokens)


class SwapDecisionsRecord(NamedTuple):
    """Whether evicted blocks were worth keeping in the host tier, in the order in which it was asked."""

    answers: tuple[bool, ...]

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.ANSWERED)
        packer.count(len(self.answers))
        packer.data += np.packbits(np.array(self.answers, dtype=bool)).tobytes()


class EndOfJournal(NamedTuple):
    """It was closed in order. The checksum is that of all bytes before this record."""

    checksum: int

    def pack(self, packer: RecordEncoder) -> None:
        packer.count(RecordKind.ENDED)
        packer.data += self.checksum.to_bytes(4, "little")


Call = (
    ArrivalRecord
    | AbortRecord
    | StopRecord
    | ConcludeRecord
    | FailRecord
    | RestrictRecord
    | ControlRecord
    | PlanRecord
    | AbsorbRecord
)
Record = Call | TokensRecord | SwapDecisionsRecord | EndOfJournal


class RecordReader:
    """Records, one after the other. Knows the number of the step that the next plan is for."""

    __slots__ = ("_next_step", "_unpacker")

    def __init__(self, unpacker: RecordDecoder) -> None:
        self._unpacker = unpacker
        self._next_step = 0

    def read(self) -> Record:
        """Raises `Unreadable`."""
        unpacker = self._unpacker
        start, number = unpacker.position, unpacker.count()
        try:
            kind = RecordKind(number)
            return self._read(kind)
        except (ValueError, IndexError, KeyError, OverflowError) as broken:
            raise UnreadableRecord(f"there is no record at byte {start}") from broken

    def _read(self, kind: RecordKind) -> Record:
        unpacker = self._unpacker
        if kind is RecordKind.ARRIVED:
            return _read_arrival(unpacker)
        if kind is RecordKind.ABORTED:
            return AbortRecord(RequestId(unpacker.count()))
        if kind is RecordKind.STOPPED:
            return StopRecord(SequenceId(unpacker.count()), _REASONS[unpacker.count()])
        if kind is RecordKind.CONCLUDED:
            return ConcludeRecord(SequenceId(unpacker.count()), _REASONS[unpacker.count()])
        if kind is RecordKind.FAILED:
            return FailRecord(RequestId(unpacker.count()))
        if kind is RecordKind.RESTRICTED:
            return RestrictRecord(frozenset(unpacker.array().tolist()) if unpacker.count() else None)
        if kind is RecordKind.RESTED:
            return PlanRecord(unpacker.real(), unpacker.count(), 0, None)
        if kind is RecordKind.PLANNED:
            return self._read_plan()
        if kind is RecordKind.ABSORBED:
            return _read_absorption(unpacker)
        if kind is RecordKind.SPOKEN:
            return TokensRecord(Row(unpacker.count()), unpacker.count(), unpacker.array().astype(np.int32))
        if kind is RecordKind.ANSWERED:
            count = unpacker.count()
            bits = np.unpackbits(np.frombuffer(unpacker.raw(-(-count // 8)), dtype=np.uint8), count=count)
            return SwapDecisionsRecord(tuple(bits.astype(bool).tolist()))
        if kind is RecordKind.ENDED:
            return EndOfJournal(int.from_bytes(unpacker.raw(4), "little"))
        return ControlRecord(kind, unpacker.count() if kind in (RecordKind.SHRUNK, RecordKind.STEPS_LOST) else 0)

    def _read_plan(self) -> PlanRecord:
        unpacker = self._unpacker
        now_s, version, checksum = unpacker.real(), unpacker.count(), int.from_bytes(unpacker.raw(4), "little")
        numbers = [unpacker.count() for _ in PlanSummary._fields[1:]]
        self._next_step += 1
        return PlanRecord(now_s, version, checksum, PlanSummary(self._next_step - 1, *numbers))


def _read_arrival(unpacker: RecordDecoder) -> ArrivalRecord:
    now_s, number, prompt = unpacker.real(), RequestId(unpacker.count()), unpacker.array().astype(np.int32)
    max_tokens, num_sequences = unpacker.count(), unpacker.count()
    partition, tenant, priority = unpacker.text(), unpacker.text(), unpacker.signed()
    end_ids, min_tokens, num_candidates = tuple(unpacker.array().tolist()), unpacker.count(), unpacker.count()
    flags = unpacker.count()
    deadline_s = unpacker.real() if flags & 2 else None
    beam = None
    if flags & 4:
        width, penalty = unpacker.count(), unpacker.real()
        beam = BeamParams(width, penalty, _STOPPINGS[unpacker.count()], unpacker.count())
    sampling = RowSampling(
        end_ids=end_ids,
        min_tokens=min_tokens,
        num_candidates=num_candidates,
        num_prompt_logprobs=0 if flags & 1 else None,
        masked=bool(flags & 8),
        pooled=bool(flags & 16),
    )
    return ArrivalRecord(
        Request(number, prompt, max_tokens, sampling, num_sequences, beam, partition, tenant, priority, deadline_s),
        now_s,
    )


def _read_absorption(unpacker: RecordDecoder) -> AbsorbRecord:
    now_s = unpacker.real()
    ended = tuple(FinishedRow(Row(unpacker.count()), _REASONS[unpacker.count()]) for _ in range(unpacker.count()))
    candidates = {}
    for _ in range(unpacker.count()):
        row, ids = Row(unpacker.count()), unpacker.array().astype(np.int32)
        logprobs: FloatArray = unpacker.reals()
        candidates[row] = Candidates(ids, logprobs)
    return AbsorbRecord(now_s, ended, unpacker.array().astype(np.int32), candidates)
