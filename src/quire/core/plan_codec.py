"""Step plans and grammar masks as bytes, for the ranks that follow the plans of rank 0.

Typed by hand with `core/codec.py`: no frame can run code, and the offline engine needs no further package. A plan
begins with its step number and with bits that say which parts follow; a steady decode step takes a few bytes.
"""

import numpy as np

from quire.core.codec import RecordDecoder, RecordEncoder, UnreadableRecord
from quire.core.ids import BlockId, Row, SequenceId
from quire.core.moves import Move, Place, Tier
from quire.core.sampling import RowSampling
from quire.core.step import (
    NO_DRAFTS,
    NO_GRANTS,
    AppendTokens,
    Chunk,
    ChunkOutput,
    Drafts,
    ForcedTokens,
    Grants,
    Masks,
    RowStart,
    StepPlan,
)

_TIERS = (Tier.DEVICE, Tier.HOST)
# Bits of the parts that a plan has.
_MOVES, _RELEASES, _STARTS, _APPENDS, _GRANTS, _CHUNKS, _PAUSES, _DRAFTS, _MASKED, _PADDING, _RESET, _FORCED = (
    1 << place for place in range(12)
)


def encode_plan(plan: StepPlan) -> bytes:
    encoder = RecordEncoder()
    encoder.count(plan.step)
    encoder.count(_parts(plan))
    encoder.count(plan.num_decoding)
    if plan.moves:
        encoder.array(2 * _TIERS.index(move.src.tier) + _TIERS.index(move.dst.tier) for move in plan.moves)
        encoder.array(move.src.block for move in plan.moves)
        encoder.array(move.dst.block for move in plan.moves)
    if plan.releases:
        encoder.array(plan.releases)
    if plan.starts:
        encoder.count(len(plan.starts))
        for row_start in plan.starts:
            _put_start(encoder, row_start)
    if plan.appends:
        encoder.count(len(plan.appends))
        for append in plan.appends:
            encoder.count(append.row)
            encoder.array(append.tokens)
    if len(plan.grants):
        encoder.array(plan.grants.rows)
        encoder.array(plan.grants.blocks)
    if plan.chunks:
        for column in zip(*plan.chunks, strict=True):
            encoder.array(each.value if isinstance(each, ChunkOutput) else each for each in column)
    if plan.pauses:
        encoder.array(plan.pauses)
    if len(plan.drafts):
        encoder.array(plan.drafts.rows)
        encoder.array(plan.drafts.counts)
    if plan.masked:
        encoder.array(plan.masked)
    if plan.num_padding:
        encoder.count(plan.num_padding)
    if plan.forced:
        encoder.count(len(plan.forced))
        for forced in plan.forced:
            encoder.count(forced.row)
            encoder.count(forced.start)
            encoder.array(forced.tokens)
    return bytes(encoder.data)


def _parts(plan: StepPlan) -> int:
    if plan.repeats and not plan.forced:
        return _GRANTS if len(plan.grants) else 0
    present = (
        plan.moves,
        plan.releases,
        plan.starts,
        plan.appends,
        len(plan.grants),
        plan.chunks,
        plan.pauses,
        len(plan.drafts),
        plan.masked,
        plan.num_padding,
        plan.reset,
        plan.forced,
    )
    return sum(1 << place for place, each in enumerate(present) if each)


def decode_plan(data: bytes) -> StepPlan:
    """Raises `UnreadableRecord`."""
    decoder = RecordDecoder(data)
    step, parts, num_decoding = decoder.count(), decoder.count(), decoder.count()
    if not parts & ~_GRANTS:  # a steady step of decoding rows: most are
        grants = Grants(decoder.integers(), decoder.integers()) if parts else NO_GRANTS
        plan = StepPlan(step, grants=grants, num_decoding=num_decoding)
    else:
        plan = _with_parts(decoder, step, parts, num_decoding)
    if not decoder.at_end:
        raise UnreadableRecord(f"bytes are left behind a plan, from {decoder.position} on")
    return plan


def _with_parts(decoder: RecordDecoder, step: int, parts: int, num_decoding: int) -> StepPlan:
    return StepPlan(
        step=step,
        moves=_moves(decoder) if parts & _MOVES else (),
        releases=_rows(decoder) if parts & _RELEASES else (),
        starts=tuple(_start(decoder) for _ in range(decoder.count())) if parts & _STARTS else (),
        appends=tuple(_append(decoder) for _ in range(decoder.count())) if parts & _APPENDS else (),
        grants=Grants(decoder.integers(), decoder.integers()) if parts & _GRANTS else NO_GRANTS,
        chunks=_chunks(decoder) if parts & _CHUNKS else (),
        pauses=_rows(decoder) if parts & _PAUSES else (),
        drafts=Drafts(decoder.integers(), decoder.integers()) if parts & _DRAFTS else NO_DRAFTS,
        masked=_rows(decoder) if parts & _MASKED else (),
        num_decoding=num_decoding,
        num_padding=decoder.count() if parts & _PADDING else 0,
        forced=tuple(_forced(decoder) for _ in range(decoder.count())) if parts & _FORCED else (),
        reset=bool(parts & _RESET),
    )


def encode_masks(masks: Masks) -> bytes:
    encoder = RecordEncoder()
    encoder.array(masks.rows)
    encoder.array(masks.passes)
    encoder.count(masks.bits.shape[1] if masks.bits.ndim == 2 else 0)
    return bytes(encoder.data) + np.ascontiguousarray(masks.bits, "<i4").tobytes()


def decode_masks(data: bytes) -> Masks:
    decoder = RecordDecoder(data)
    rows, passes, width = decoder.integers(), tuple(decoder.array().tolist()), decoder.count()
    bits = np.frombuffer(decoder.raw(4 * width * len(rows)), "<i4").astype(np.int32).reshape(len(rows), width)
    return Masks(rows, bits, passes)


def _rows(decoder: RecordDecoder) -> tuple[Row, ...]:
    return tuple(Row(each) for each in decoder.array().tolist())


def _moves(decoder: RecordDecoder) -> tuple[Move, ...]:
    tiers, sources, targets = (decoder.array().tolist() for _ in range(3))
    return tuple(
        Move(Place(_TIERS[pair // 2], BlockId(source)), Place(_TIERS[pair % 2], BlockId(target)))
        for pair, source, target in zip(tiers, sources, targets, strict=True)
    )


def _forced(decoder: RecordDecoder) -> ForcedTokens:
    return ForcedTokens(Row(decoder.count()), decoder.count(), decoder.integers())


def _append(decoder: RecordDecoder) -> AppendTokens:
    return AppendTokens(Row(decoder.count()), tuple(decoder.array().tolist()))


def _chunks(decoder: RecordDecoder) -> tuple[Chunk, ...]:
    columns = (decoder.array().tolist() for _ in range(4))
    return tuple(
        Chunk(Row(row), start, length, ChunkOutput(output)) for row, start, length, output in zip(*columns, strict=True)
    )


def _put_start(encoder: RecordEncoder, row_start: RowStart) -> None:
    encoder.count(row_start.row)
    encoder.count(row_start.sequence)
    encoder.count(row_start.branch)
    encoder.array(row_start.tokens)
    encoder.count(row_start.num_prompt)
    encoder.count(row_start.max_length)
    _put_sampling(encoder, row_start.sampling)
    encoder.array(row_start.continuation)


def _start(decoder: RecordDecoder) -> RowStart:
    return RowStart(
        row=Row(decoder.count()),
        sequence=SequenceId(decoder.count()),
        branch=decoder.count(),
        tokens=decoder.integers(),
        num_prompt=decoder.count(),
        max_length=decoder.count(),
        sampling=_sampling(decoder),
        continuation=decoder.integers(),
    )


_REALS = (
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _put_sampling(encoder: RecordEncoder, sampling: RowSampling) -> None:
    for name in _REALS:
        encoder.real(getattr(sampling, name))
    encoder.count(sampling.top_k)
    encoder.signed(sampling.seed)
    encoder.count(sampling.min_tokens)
    encoder.array(sampling.end_ids)
    encoder.array(token for token, _ in sampling.logit_bias)
    for _, bias in sampling.logit_bias:
        encoder.real(bias)
    encoder.count(len(sampling.bad_words))
    for word in sampling.bad_words:
        encoder.array(word)
    encoder.count(sampling.allowed_ids is not None)
    encoder.array(sampling.allowed_ids or ())
    encoder.signed(-1 if sampling.num_logprobs is None else sampling.num_logprobs)
    encoder.signed(-1 if sampling.num_prompt_logprobs is None else sampling.num_prompt_logprobs)
    encoder.count(sampling.num_candidates)
    encoder.count(sampling.masked | sampling.pooled << 1)


def _sampling(decoder: RecordDecoder) -> RowSampling:
    reals = {name: decoder.real() for name in _REALS}
    top_k, seed, min_tokens = decoder.count(), decoder.signed(), decoder.count()
    end_ids, biased = _ids(decoder), _ids(decoder)
    logit_bias = tuple((token, decoder.real()) for token in biased)
    bad_words = tuple(_ids(decoder) for _ in range(decoder.count()))
    has_allowed, allowed = decoder.count(), _ids(decoder)
    num_logprobs, num_prompt_logprobs, num_candidates = decoder.signed(), decoder.signed(), decoder.count()
    switches = decoder.count()
    return RowSampling(
        top_k=top_k,
        seed=seed,
        min_tokens=min_tokens,
        end_ids=end_ids,
        logit_bias=logit_bias,
        bad_words=bad_words,
        allowed_ids=allowed if has_allowed else None,
        num_logprobs=None if num_logprobs < 0 else num_logprobs,
        num_prompt_logprobs=None if num_prompt_logprobs < 0 else num_prompt_logprobs,
        num_candidates=num_candidates,
        masked=bool(switches & 1),
        pooled=bool(switches & 2),
        **reals,
    )


def _ids(decoder: RecordDecoder) -> tuple[int, ...]:
    return tuple(decoder.array().tolist())
