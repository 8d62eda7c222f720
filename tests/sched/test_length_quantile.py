"""The hedge is the quantile of a plain recount, and never outside what the request may still do."""

from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from quire.sched.reservation import MIN_FINISHED, LengthQuantile


@given(
    lengths=st.lists(st.integers(1, 60), max_size=120),
    window=st.integers(MIN_FINISHED, 40),
    quantile=st.sampled_from([0.25, 0.5, 0.75, 1.0]),
    max_tokens=st.integers(1, 80),
    share=st.floats(0, 1, exclude_max=True),
)
def test_the_hedge_is_the_quantile_of_the_recent_lengths_that_are_longer(
    lengths: list[int], window: int, quantile: float, max_tokens: int, share: float
) -> None:
    num_generated = int(share * max_tokens)
    learned = LengthQuantile(window, quantile)
    for length in lengths:
        learned.note(length)
    recent = lengths[-window:]
    longer = sorted(length for length in recent if length > num_generated)
    hedge = learned.hedge(max_tokens, num_generated)
    if len(recent) < MIN_FINISHED or not longer:
        assert hedge == num_generated + ceil((max_tokens - num_generated) / 2)
    else:
        assert hedge == min(max_tokens, longer[ceil(quantile * len(longer)) - 1])
    assert num_generated < hedge <= max_tokens


def test_before_anything_is_learned_it_is_half_of_what_may_come() -> None:
    learned = LengthQuantile()
    assert [learned.hedge(n) for n in (1, 2, 3, 100)] == [1, 1, 2, 50]
    for _ in range(MIN_FINISHED - 1):
        learned.note(7)
    assert learned.hedge(100) == 50
    learned.note(7)
    assert learned.hedge(100) == 7
    assert learned.hedge(5) == 5
    assert learned.hedge(100, num_generated=7) == 54  # none grew so long: half of the remaining 93, rounded up


def test_old_lengths_are_forgotten() -> None:
    learned = LengthQuantile(window=16)
    for length in [900] * 16 + [10] * 15:
        learned.note(length)
    assert learned.hedge(1000, num_generated=10) == 900
    learned.note(10)
    assert learned.hedge(1000, num_generated=10) == 505
    assert learned.hedge(1000) == 10
