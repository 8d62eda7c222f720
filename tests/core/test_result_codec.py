"""A result is the same after it was bytes; bytes that are no result are refused."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.codec import UnreadableRecord
from quire.core.ids import FloatArray, Row
from quire.core.result_codec import RowOutcome, decode_outcome, decode_result, encode_outcome, encode_result
from quire.core.step import (
    Candidates,
    FinishedRow,
    FinishReason,
    PromptLogprobs,
    StepResult,
    TopLogprobs,
    Verified,
)
from tests.core.test_plan_codec import arrays, counts, reals
from tests.tiers import examples

rows = counts.map(Row)


def floats(*, size: int = 4) -> st.SearchStrategy[FloatArray]:
    return st.lists(st.floats(width=32), min_size=size, max_size=size).map(lambda each: np.array(each, np.float32))


tops = st.lists(st.builds(TopLogprobs, counts, reals, counts, arrays(), floats()), max_size=2).map(tuple)
results = st.builds(
    StepResult,
    step=counts,
    rows=arrays() | arrays(size=0),
    tokens=arrays(),
    ended=st.lists(st.builds(FinishedRow, rows, st.sampled_from(FinishReason)), max_size=3).map(tuple),
    logprobs=st.dictionaries(rows, tops, max_size=2),
    prompt_logprobs=st.lists(st.builds(PromptLogprobs, rows, counts, tops), max_size=2).map(tuple),
    candidates=st.dictionaries(rows, st.builds(Candidates, arrays(), floats()), max_size=2),
    pooled=st.dictionaries(rows, floats(size=7), max_size=2),
    passes=st.lists(counts, max_size=3).map(tuple),
    verified=st.builds(Verified, arrays(), arrays(), arrays(), arrays()),
)


def plain(result: StepResult) -> dict[str, Any]:
    return result._asdict() | {"verified": asdict(result.verified)}


@settings(max_examples=examples(20, 200))
@given(results)
def test_a_result_is_the_same_after_it_was_bytes(result: StepResult) -> None:
    found = decode_result(encode_result(result))
    np.testing.assert_equal(plain(found), plain(result))
    assert found.rows.dtype == found.tokens.dtype == np.int32


@settings(max_examples=examples(20, 200))
@given(results)
def test_stages_get_the_tokens_and_the_rows_that_ended(result: StepResult) -> None:
    outcome = decode_outcome(encode_outcome(RowOutcome.of(result)))
    assert outcome.rows.tolist() == result.rows.tolist()
    assert outcome.tokens.tolist() == result.tokens.tolist()
    assert outcome.ended.tolist() == [over.row for over in result.ended]


def test_what_is_too_short_or_too_long_is_refused() -> None:
    data = encode_result(StepResult(3, np.array([1], np.int32), np.array([2], np.int32)))
    for broken in (data[:-1], data + b"\0"):
        with pytest.raises(UnreadableRecord):
            decode_result(broken)
