"""Journal records: one for each call of a scheduler. Depends on their bytes, not their effect.

A journal is MAGIC, one byte of version, the spec as JSON text, then records: one byte of kind, and the
fields in the order of the classes below, as `core/codec.py` packs them. Steps are numbered by counting the
plans that were not empty. What cannot be derived by following the plans is written; what can be, is not. Tokens are
written once, when the row that emitted them is released.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from quire.core.codec import RecordDecoder, RecordEncoder, UnreadableRecord
from quire.core.ids import FloatArray, IntArray, RequestId, Row, SequenceId
from quire.core.request import BeamParams, BlockOwner, EarlyStopping, Request
from quire.core.sampling import RowSampling
from quire.core.step import Candidates, FinishedRow, FinishReason

MAGIC = b"quire journal\n"
VERSION = 4

_REASONS = (  # numbered by position: append only
    FinishReason.STOP,
    FinishReason.LENGTH,
    FinishReason.ABORT,
    FinishReason.ERROR,
    FinishReason.EXPIRED,
    FinishReason.OUT_OF_MEMORY,
    FinishReason.FAILED,
    FinishReason.NOTHING_LEFT,
    FinishReason.GRAMMAR_FAILED,
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
    NOT_PLANNED = 10
    ABSORBED = 11
    EMITTED = 12
    SWAP_DECIDED = 13
    ENDED = 14
    CONCLUDED = 15
    FAILED = 16
    RESTRICTED = 17
    WITHDRAWN = 18
    EXPECTED = 19
    LOOKUP_HITS = 20
    PREFIX_HELD = 21
    PREFIX_RELEASED = 22


class PlanSummary(NamedTuple):
    """The counts of a plan, for messages."""

    step: int
    num_decoding: int
    num_chunk_tokens: int
    num_moves: int
    num_releases: int
    num_starts: int
    num_appends: int
    num_grants: int
    num_chunks: int
    num_pauses: int
    num_drafts: int


class ArrivalRecord(NamedTuple):
    """`add`. Of the sampling parameters, those that decisions depend on."""

    request: Request
    now_s: float

    def pack(self, encoder: RecordEncoder) -> None:
        request, sampling, beam = self.request, self.request.sampling, self.request.beam
        encoder.count(RecordKind.ARRIVED)
        encoder.real(self.now_s)
        encoder.count(request.id)
        encoder.array(request.prompt)
        encoder.count(request.max_tokens)
        encoder.count(request.num_sequences)
        encoder.text(request.partition)
        encoder.text(request.tenant)
        encoder.signed(request.priority)
        encoder.array(sampling.end_ids)
        encoder.count(sampling.min_tokens)
        encoder.count(sampling.num_candidates)
        scored = sampling.num_prompt_logprobs is not None
        timed, beams = request.deadline_s is not None, beam is not None
        encoder.count(scored | timed << 1 | beams << 2 | sampling.masked << 3 | sampling.pooled << 4)
        if request.deadline_s is not None:
            encoder.real(request.deadline_s)
        if beam is not None:
            encoder.count(beam.width)
            encoder.real(beam.length_penalty)
            encoder.count(_STOPPINGS.index(beam.early_stopping))
            encoder.count(beam.num_returned)


class AbortRecord(NamedTuple):
    """`abort`."""

    request: RequestId

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.ABORTED)
        encoder.count(self.request)


class StopRecord(NamedTuple):
    """`finish`: the output processor ended one sequence."""

    sequence: SequenceId
    reason: FinishReason

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.STOPPED)
        encoder.count(self.sequence)
        encoder.count(_REASONS.index(self.reason))


class ConcludeRecord(NamedTuple):
    """`conclude`: the engine ended one sequence."""

    sequence: SequenceId
    reason: FinishReason

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.CONCLUDED)
        encoder.count(self.sequence)
        encoder.count(_REASONS.index(self.reason))


class ExpectRecord(NamedTuple):
    """`expect`. Of the tokens, how many they are: no decision depends on which."""

    sequence: SequenceId
    start: int
    num_tokens: int

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.EXPECTED)
        encoder.count(self.sequence)
        encoder.count(self.start)
        encoder.count(self.num_tokens)


class FailRecord(NamedTuple):
    """`fail`."""

    request: RequestId

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.FAILED)
        encoder.count(self.request)


class RestrictRecord(NamedTuple):
    """`admit_only`."""

    orders: frozenset[int] | None

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.RESTRICTED)
        encoder.count(self.orders is not None)
        if self.orders is not None:
            encoder.array(sorted(self.orders))


class HoldRecord(NamedTuple):
    """`hold_prefix`."""

    owner: BlockOwner
    tokens: IntArray
    with_room: bool

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.PREFIX_HELD)
        encoder.count(self.owner.request)
        encoder.text(self.owner.partition)
        encoder.signed(self.owner.priority)
        encoder.array(self.tokens)
        encoder.count(self.with_room)


class ReleaseRecord(NamedTuple):
    """`release_prefix`."""

    number: int
    written: bool

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.PREFIX_RELEASED)
        encoder.count(self.number)
        encoder.count(self.written)


class ControlRecord(NamedTuple):
    """`drain`, `reset_cache`, `shrink`, `lose_steps`, `fail_largest` or `withdraw_all`.

    `number`: the blocks to shrink by; whether the cache is kept.
    """

    kind: RecordKind
    number: int = 0

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(self.kind)
        if self.kind in (RecordKind.SHRUNK, RecordKind.STEPS_LOST):
            encoder.count(self.number)


class PlanRecord(NamedTuple):
    """`plan` and its result: none, or a plan with this checksum."""

    now_s: float
    cost_version: int
    checksum: int
    summary: PlanSummary | None

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.NOT_PLANNED if self.summary is None else RecordKind.PLANNED)
        encoder.real(self.now_s)
        encoder.count(self.cost_version)
        if self.summary is not None:
            encoder.data += self.checksum.to_bytes(4, "little")
            for number in self.summary[1:]:
                encoder.count(number)


class AbsorbRecord(NamedTuple):
    """`absorb`. Of the result: finished rows, candidates, rows whose emission differs from `ExpectedEmitters`, and of
    the rows with drafts, in the order of the plan, how many were computed and accepted."""

    now_s: float
    ended: tuple[FinishedRow, ...]
    unexpected: IntArray
    candidates: Mapping[Row, Candidates]
    drafted: IntArray
    accepted: IntArray

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.ABSORBED)
        encoder.real(self.now_s)
        encoder.count(len(self.ended))
        for row, reason in self.ended:
            encoder.count(row)
            encoder.count(_REASONS.index(reason))
        encoder.count(len(self.candidates))
        for row, candidates in self.candidates.items():
            encoder.count(row)
            encoder.array(candidates.ids)
            encoder.reals(candidates.logprobs)
        encoder.array(self.unexpected)
        encoder.array(np.concatenate([self.drafted, self.accepted]))


class TokensRecord(NamedTuple):
    """All that a row emitted from the step it was taken in until it was left."""

    row: Row
    first_step: int
    tokens: IntArray

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.EMITTED)
        encoder.count(self.row)
        encoder.count(self.first_step)
        encoder.array(self.tokens)


class LookupHitsRecord(NamedTuple):
    """The rows whose token prompt lookup would have drafted, of one pass of a step: tokens themselves come later."""

    rows: IntArray

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.LOOKUP_HITS)
        encoder.array(self.rows)


class SwapDecisionsRecord(NamedTuple):
    """Whether evicted blocks were worth keeping in the host tier, in order."""

    decisions: tuple[bool, ...]

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.SWAP_DECIDED)
        encoder.count(len(self.decisions))
        encoder.data += np.packbits(np.array(self.decisions, dtype=bool)).tobytes()


class EndOfJournal(NamedTuple):
    """The journal is complete. The checksum covers all bytes before this record."""

    checksum: int

    def pack(self, encoder: RecordEncoder) -> None:
        encoder.count(RecordKind.ENDED)
        encoder.data += self.checksum.to_bytes(4, "little")


Call = (
    ArrivalRecord
    | AbortRecord
    | StopRecord
    | ConcludeRecord
    | ExpectRecord
    | FailRecord
    | RestrictRecord
    | HoldRecord
    | ReleaseRecord
    | ControlRecord
    | PlanRecord
    | AbsorbRecord
)
Record = Call | TokensRecord | LookupHitsRecord | SwapDecisionsRecord | EndOfJournal


class RecordReader:
    """Reads records in order. Counts the steps, to number each plan."""

    __slots__ = ("_decoder", "_next_step")

    def __init__(self, decoder: RecordDecoder) -> None:
        self._decoder = decoder
        self._next_step = 0

    def read(self) -> Record:
        """Raises `Unreadable`."""
        decoder = self._decoder
        start, number = decoder.position, decoder.count()
        try:
            kind = RecordKind(number)
            return self._read(kind)
        except (ValueError, IndexError, KeyError, OverflowError) as broken:
            raise UnreadableRecord(f"there is no record at byte {start}") from broken

    def _read(self, kind: RecordKind) -> Record:
        decoder = self._decoder
        if kind is RecordKind.ARRIVED:
            return _read_arrival(decoder)
        if kind is RecordKind.ABORTED:
            return AbortRecord(RequestId(decoder.count()))
        if kind is RecordKind.STOPPED:
            return StopRecord(SequenceId(decoder.count()), _REASONS[decoder.count()])
        if kind is RecordKind.CONCLUDED:
            return ConcludeRecord(SequenceId(decoder.count()), _REASONS[decoder.count()])
        if kind is RecordKind.EXPECTED:
            return ExpectRecord(SequenceId(decoder.count()), decoder.count(), decoder.count())
        if kind is RecordKind.FAILED:
            return FailRecord(RequestId(decoder.count()))
        if kind is RecordKind.RESTRICTED:
            return RestrictRecord(frozenset(decoder.array().tolist()) if decoder.count() else None)
        if kind is RecordKind.PREFIX_HELD:
            owner = BlockOwner(RequestId(decoder.count()), decoder.text(), decoder.signed())
            return HoldRecord(owner, decoder.array().astype(np.int32), bool(decoder.count()))
        if kind is RecordKind.PREFIX_RELEASED:
            return ReleaseRecord(decoder.count(), bool(decoder.count()))
        if kind is RecordKind.NOT_PLANNED:
            return PlanRecord(decoder.real(), decoder.count(), 0, None)
        if kind is RecordKind.PLANNED:
            return self._read_plan()
        if kind is RecordKind.ABSORBED:
            return _read_absorption(decoder)
        if kind is RecordKind.EMITTED:
            return TokensRecord(Row(decoder.count()), decoder.count(), decoder.array().astype(np.int32))
        if kind is RecordKind.LOOKUP_HITS:
            return LookupHitsRecord(decoder.array().astype(np.int32))
        if kind is RecordKind.SWAP_DECIDED:
            count = decoder.count()
            bits = np.unpackbits(np.frombuffer(decoder.raw(-(-count // 8)), dtype=np.uint8), count=count)
            return SwapDecisionsRecord(tuple(bits.astype(bool).tolist()))
        if kind is RecordKind.ENDED:
            return EndOfJournal(int.from_bytes(decoder.raw(4), "little"))
        return ControlRecord(kind, decoder.count() if kind in (RecordKind.SHRUNK, RecordKind.STEPS_LOST) else 0)

    def _read_plan(self) -> PlanRecord:
        decoder = self._decoder
        now_s, version, checksum = decoder.real(), decoder.count(), int.from_bytes(decoder.raw(4), "little")
        numbers = [decoder.count() for _ in PlanSummary._fields[1:]]
        self._next_step += 1
        return PlanRecord(now_s, version, checksum, PlanSummary(self._next_step - 1, *numbers))


def _read_arrival(decoder: RecordDecoder) -> ArrivalRecord:
    now_s, number, prompt = decoder.real(), RequestId(decoder.count()), decoder.array().astype(np.int32)
    max_tokens, num_sequences = decoder.count(), decoder.count()
    if not num_sequences:
        raise ValueError("a request of no sequence")
    partition, tenant, priority = decoder.text(), decoder.text(), decoder.signed()
    end_ids, min_tokens, num_candidates = tuple(decoder.array().tolist()), decoder.count(), decoder.count()
    flags = decoder.count()
    deadline_s = decoder.real() if flags & 2 else None
    beam = None
    if flags & 4:
        width, penalty = decoder.count(), decoder.real()
        beam = BeamParams(width, penalty, _STOPPINGS[decoder.count()], decoder.count())
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


def _read_absorption(decoder: RecordDecoder) -> AbsorbRecord:
    now_s = decoder.real()
    ended = tuple(FinishedRow(Row(decoder.count()), _REASONS[decoder.count()]) for _ in range(decoder.count()))
    candidates = {}
    for _ in range(decoder.count()):
        row, ids = Row(decoder.count()), decoder.array().astype(np.int32)
        logprobs: FloatArray = decoder.reals()
        candidates[row] = Candidates(ids, logprobs)
    unexpected, verified = decoder.array().astype(np.int32), decoder.array().astype(np.int32)
    drafted, accepted = verified[: len(verified) // 2], verified[len(verified) // 2 :]
    return AbsorbRecord(now_s, ended, unexpected, candidates, drafted, accepted)
