"""A plan and its masks are the same after they were bytes; bytes that are no plan are refused."""

from dataclasses import fields

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.codec import UnreadableRecord
from quire.core.ids import BlockId, IntArray, Row, SequenceId
from quire.core.moves import Move, Place, Tier
from quire.core.plan_codec import decode_masks, decode_plan, encode_masks, encode_plan
from quire.core.sampling import RowSampling
from quire.core.step import AppendTokens, Chunk, ChunkOutput, Drafts, ForcedTokens, Grants, Masks, RowStart, StepPlan

counts = st.integers(0, 2**31 - 1)
ids = st.lists(counts, max_size=4).map(tuple)
reals = st.floats(-100, 100)
rows = st.lists(counts.map(Row), max_size=4).map(tuple)
some = st.none() | counts
OUTPUTS = [ChunkOutput.NONE, ChunkOutput.SAMPLE, ChunkOutput.SAMPLE | ChunkOutput.PROMPT_LOGPROBS, ChunkOutput.POOLED]


def arrays(*, size: int = 4) -> st.SearchStrategy[IntArray]:
    return st.lists(counts, min_size=size, max_size=size).map(lambda numbers: np.array(numbers, dtype=np.int32))


samplings = st.builds(
    RowSampling,
    temperature=reals,
    top_k=counts,
    top_p=reals,
    min_p=reals,
    repetition_penalty=reals,
    presence_penalty=reals,
    frequency_penalty=reals,
    seed=st.integers(-(2**63), 2**63 - 1),
    min_tokens=counts,
    end_ids=ids,
    logit_bias=st.lists(st.tuples(counts, reals), max_size=3).map(tuple),
    bad_words=st.lists(ids, max_size=3).map(tuple),
    allowed_ids=st.none() | ids,
    num_logprobs=some,
    num_prompt_logprobs=some,
    num_candidates=counts,
    masked=st.booleans(),
    pooled=st.booleans(),
)
starts = st.builds(
    RowStart,
    row=counts.map(Row),
    sequence=counts.map(SequenceId),
    branch=counts,
    tokens=arrays(),
    num_prompt=counts,
    max_length=counts,
    sampling=samplings,
    continuation=arrays(size=0) | arrays(),
)
places = st.builds(Place, st.sampled_from(Tier), counts.map(BlockId))
plans = st.builds(
    StepPlan,
    step=st.integers(0, 2**40),
    moves=st.lists(st.builds(Move, places, places), max_size=4).map(tuple),
    releases=rows,
    starts=st.lists(starts, max_size=3).map(tuple),
    appends=st.lists(st.builds(AppendTokens, counts.map(Row), ids), max_size=3).map(tuple),
    grants=st.builds(Grants) | st.builds(Grants, arrays(), arrays()),
    chunks=st.lists(st.builds(Chunk, counts.map(Row), counts, counts, st.sampled_from(OUTPUTS)), max_size=4).map(tuple),
    pauses=rows,
    drafts=st.builds(Drafts) | st.builds(Drafts, arrays(), arrays()),
    forced=st.lists(st.builds(ForcedTokens, counts.map(Row), counts, arrays()), max_size=2).map(tuple),
    masked=rows,
    num_decoding=counts,
    num_padding=counts,
    reset=st.booleans(),
)


def plain(value: object) -> object:
    """Arrays, which compare by element, as their type and their numbers."""
    match value:
        case np.ndarray():
            return str(value.dtype), value.tolist()
        case Grants() | Drafts() | RowSampling():
            return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
        case tuple():
            return [plain(each) for each in value]
    return value


@given(plans)
def test_a_plan_is_the_same_afterwards(plan: StepPlan) -> None:
    assert plain(decode_plan(encode_plan(plan))) == plain(plan)


@given(plans, st.data())
def test_a_plan_that_was_cut_or_grew_is_refused(plan: StepPlan, data: st.DataObject) -> None:
    encoded = encode_plan(plan)
    with pytest.raises(UnreadableRecord):
        decode_plan(encoded[: data.draw(st.integers(0, len(encoded) - 1))])
    with pytest.raises(UnreadableRecord, match="bytes are left"):
        decode_plan(encoded + b"\0")


def test_a_steady_step_takes_a_few_bytes() -> None:
    assert len(encode_plan(StepPlan(1_000_000, num_decoding=256))) == 6


@given(st.integers(0, 3), st.integers(1, 5), st.sampled_from([(), (1,), (1, 2)]))
def test_masks_are_the_same_afterwards(num_rows: int, width: int, passes: tuple[int, ...]) -> None:
    bits = np.arange(num_rows * width, dtype=np.int32).reshape(num_rows, width) - 3
    found = decode_masks(encode_masks(Masks(np.arange(num_rows, dtype=np.int32), bits, passes)))
    assert found.passes == passes
    assert plain(found.rows) == plain(np.arange(num_rows, dtype=np.int32))
    assert plain(found.bits) == plain(bits)


def test_a_plan_that_names_anything_but_blocks_repeats_no_step() -> None:
    """A repeated step is computed without a look at the plan: a copy, a mask or a pause in it would be lost."""
    place = Place(Tier.DEVICE, BlockId(1))
    one = np.array([0], dtype=np.int32)
    named: dict[str, object] = {
        "moves": (Move(place, place),),
        "releases": (Row(0),),
        "starts": (RowStart(Row(0), SequenceId(0), 0, one, 1, 4, RowSampling()),),
        "appends": (AppendTokens(Row(0), (5,)),),
        "chunks": (Chunk(Row(0), 0, 1, ChunkOutput.SAMPLE),),
        "pauses": (Row(0),),
        "drafts": Drafts(one, one + 1),
        "masked": (Row(0),),
        "num_padding": 3,
        "reset": True,
    }
    others = {"step", "grants", "num_decoding", "forced"}  # of rows with drafts
    assert set(named) | others == set(StepPlan._fields)
    assert StepPlan(7, grants=Grants(one, one), num_decoding=2).repeats
    for name, value in named.items():
        assert not StepPlan(7, **{name: value}).repeats, name  # type: ignore[arg-type]
