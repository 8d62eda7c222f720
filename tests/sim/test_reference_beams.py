"""The plain search and the shipped one know nothing of each other, and find the same."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import RequestId
from quire.core.oracle import candidates, total
from quire.core.request import BeamParams, EarlyStopping, Request
from quire.core.sampling import RowSampling
from quire.core.step import FinishReason
from quire.sched.beam_search import BeamSearch
from quire.sim.check.expected import finish_reason, search

PROMPT = np.array([5, 96, 3], np.int32)


def asked(params: BeamParams, max_tokens: int, end_ids: tuple[int, ...] = ()) -> Request:
    return Request(RequestId(1), PROMPT, max_tokens, RowSampling(end_ids=end_ids), params.width, params)


def shipped(request: Request, vocab_size: int) -> list[list[int]]:
    assert request.beam is not None
    beams = BeamSearch(request.beam, len(PROMPT), request.max_length, request.sampling.end_ids)
    live = [PROMPT]
    while live:
        offers = [candidates(total(tokens), vocab_size, beams.num_candidates) for tokens in live]
        step = beams.advance(offers)
        pairs = () if step is None else zip(step.parents, step.tokens, strict=True)
        live = [np.append(live[parent], np.int32(token)) for parent, token in pairs]
    return [list(result.tokens) for result in beams.results()]


@settings(max_examples=150)
@given(
    width=st.integers(1, 4),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    stopping=st.sampled_from(EarlyStopping),
    max_tokens=st.integers(1, 12),
    vocab_size=st.sampled_from([40, 97]),
    first_end=st.integers(0, 20),
    end_every=st.sampled_from([1000, 19, 7, 3]),
)
def test_both_searches_find_the_same(
    width: int,
    length_penalty: float,
    stopping: EarlyStopping,
    max_tokens: int,
    vocab_size: int,
    first_end: int,
    end_every: int,
) -> None:
    ends = tuple(range(first_end, vocab_size, end_every))
    request = asked(BeamParams(width, length_penalty, stopping, width), max_tokens, ends)
    assert search(request, vocab_size) == shipped(request, vocab_size)


def test_one_step_by_hand() -> None:
    summed = total(PROMPT)
    best = [[(summed + rank) % 97] for rank in range(3)]
    request = asked(BeamParams(3, num_returned=2), 1)
    assert search(request, 97) == best[:2]
    assert finish_reason(best[0], request) is FinishReason.LENGTH
    assert finish_reason(best[0], asked(BeamParams(3), 1, tuple(best[0]))) is FinishReason.STOP
