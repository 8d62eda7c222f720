"""Rows of every kind for the random tests."""

import numpy as np
from hypothesis import strategies as st

from quire.core.sampling import RowSampling
from tests.sampling.reference import Case, Floats

VOCAB = 24
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def row_samplings(draw: st.DrawFn) -> RowSampling:
    """Any mixture of parameters. Values with few digits: their borders are exact or clearly missed."""
    return RowSampling(
        temperature=draw(st.sampled_from([0.0, 0.25, 0.7, 1.0, 1.9])),
        top_k=draw(st.sampled_from([0, 0, 1, 3, 10])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.05, 0.53, 0.91])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.031, 0.37])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.8, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 1.25, -0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.75, -0.25])),
        seed=draw(st.integers(-(2**63) + 1, 2**63 - 1)),
        min_tokens=draw(st.integers(0, 4)),
        end_ids=tuple(draw(st.sets(st.integers(0, 7), max_size=3))),
        logit_bias=tuple(draw(st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.5, 2.25]), max_size=3)).items()),
        bad_words=tuple(draw(st.lists(st.lists(st.integers(8, 11), min_size=1, max_size=3).map(tuple), max_size=4))),
        allowed_ids=draw(st.none() | st.sets(TOKENS, max_size=9).map(lambda ids: (*sorted(ids), 22, 23))),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    tokens = draw(st.lists(st.integers(6, 12), min_size=1, max_size=8).map(tuple))
    return Case(draw(row_samplings()), tokens, draw(st.integers(1, len(tokens))), draw(st.integers(0, 3)))


@st.composite
def logits_of(draw: st.DrawFn, num_rows: int) -> Floats:
    """Eighths, so that equal logits are common."""
    eighths = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB)
    rows = draw(st.lists(eighths, min_size=num_rows, max_size=num_rows))
    return np.array(rows, dtype=np.float64) / 8
