"""Pacing: step sizes from the offered load and two latency targets, the estimate of the load, late steps."""

from math import isclose

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sched.cost_model import Constants, CostTable, StepShape
from quire.sched.pacing import (
    DELAY_S,
    EFFICIENT,
    LATE_SHARE,
    LOAD_STRETCH,
    LONG_STRETCH,
    MIN_PREFILL_TOKENS,
    QUEUE_EFFICIENT,
    UTILIZATION,
    WINDOW_S,
    Demand,
    LateSteps,
    OfferedLoad,
    Pace,
    StepBound,
    Targets,
    choose_pace,
    largest_next_chunk,
    long_limit_s,
)

# An 8B model on an H200: 4 ms for the weights, 21 µs a token.
H200 = Constants(3e-4, 3.9e-3, 2.1e-5, 3.2e-8, 8e-10)
ROWS = StepShape(num_rows=16, num_context=16_000)
TARGETS = Targets(itl_s=0.012, ttft_s=0.036, limit_s=0.072, queue_limit_s=0.1, long_limit_s=0.05)
SIZES = (16, 48, 112, 240, 368, 496, 752, 1008, 1520, 2032, 4080)
MOST = 8192


def pace(demand: Demand, targets: Targets = TARGETS, sizes: tuple[int, ...] = SIZES, step: StepShape = ROWS) -> Pace:
    return choose_pace(CostTable(H200), step, 0, MOST, sizes, targets, demand)


def seconds(length: int) -> float:
    return CostTable(H200).predict_s(ROWS.with_chunk(0, length))


def test_without_demand_the_itl_target_decides() -> None:
    found = pace(Demand())
    assert found == Pace(largest_next_chunk(CostTable(H200), ROWS, 0, MOST, 0.012, SIZES), StepBound.ITL)
    assert seconds(found.num_tokens) <= 0.012


def test_load_takes_the_smallest_size_that_holds_the_utilization() -> None:
    found = pace(Demand(tokens_per_s=UTILIZATION * 39_000))
    assert found.bound is StepBound.LOAD
    assert found.num_tokens / seconds(found.num_tokens) >= 39_000
    smaller = SIZES[SIZES.index(found.num_tokens) - 1]
    assert smaller / seconds(smaller) < 39_000


@pytest.mark.parametrize(("tokens_per_s", "bound"), [(25_000, StepBound.LOAD), (60_000, StepBound.SATURATED)])
def test_a_load_that_is_carried_is_not_called_saturation(tokens_per_s: float, bound: StepBound) -> None:
    """No size holds either below the utilization; the first, about half of what the card does, is carried."""
    found = pace(Demand(tokens_per_s=tokens_per_s))
    assert found.bound is bound
    assert (found.num_tokens / seconds(found.num_tokens) >= tokens_per_s) == (bound is StepBound.LOAD)


def test_more_than_any_size_carries_is_saturation_at_the_efficient_size() -> None:
    found = pace(Demand(tokens_per_s=1e6))
    rates = {size: size / seconds(size) for size in SIZES if seconds(size) <= TARGETS.limit_s}
    assert found.bound is StepBound.SATURATED
    assert found.num_tokens == min(size for size, rate in rates.items() if rate >= EFFICIENT * max(rates.values()))
    assert found.num_tokens < max(rates), "larger ones are hardly better"


def test_a_queue_makes_steps_longer_by_the_root_of_its_time() -> None:
    times_s = [seconds(pace(Demand(backlog=backlog)).num_tokens) for backlog in (500, 2000, 8000, 10**6)]
    assert times_s == sorted(times_s) and times_s[0] <= TARGETS.itl_s < times_s[1] < times_s[2] <= times_s[3]
    assert pace(Demand(backlog=8000)).bound is StepBound.BACKLOG
    assert times_s[3] <= TARGETS.queue_limit_s
    rates = {size: size / seconds(size) for size in SIZES if seconds(size) <= TARGETS.queue_limit_s}
    longest = pace(Demand(backlog=10**6)).num_tokens
    assert rates[longest] >= QUEUE_EFFICIENT * max(rates.values()), "each prompt of the queue waits for what is lost"


def test_a_late_step_holds_all_that_prompts_lack_or_as_much_as_its_limit_allows() -> None:
    found = pace(Demand(long=1900))
    assert found == Pace(2032, StepBound.LONG_PROMPT, long=True), "the smallest that holds it"
    found = pace(Demand(long=60_000))
    following = SIZES[SIZES.index(found.num_tokens) + 1]
    assert seconds(found.num_tokens) <= TARGETS.long_limit_s < seconds(following)
    assert pace(Demand(long=300)).bound is StepBound.ITL


def test_a_late_step_is_longer_beside_few_rows() -> None:
    limits_s = [long_limit_s(0.012, 0.012, rows) for rows in (1, 4, 8, 16, 28, 64)]
    assert limits_s[0] == LONG_STRETCH * 0.012 and limits_s == sorted(limits_s, reverse=True)
    for rows, limit_s in zip((8, 16), limits_s[2:4], strict=True):
        assert rows * (limit_s - 0.012) == pytest.approx(DELAY_S), "what it delays all rows together"
    assert limits_s[-2:] == [pytest.approx(LOAD_STRETCH * 0.012)] * 2
    assert long_limit_s(0.09, 0.012, 4) == limits_s[0], "no longer than the longest, however long others are"


def test_without_decoding_rows_a_step_has_the_efficient_size() -> None:
    found = pace(Demand(), step=StepShape())
    assert found.bound is StepBound.EFFICIENT and 496 <= found.num_tokens < 4080
    assert choose_pace(CostTable(H200), StepShape(), 0, 100, (), TARGETS, Demand()) == Pace(100, StepBound.MAX_STEP)


def test_without_a_ttft_target_the_itl_target_is_kept() -> None:
    assert pace(Demand(1e6, 10**6, 10**6), TARGETS._replace(ttft_s=None)).bound is StepBound.ITL


@given(
    rate=st.floats(0, 1e6),
    backlog=st.integers(0, 10**6),
    long=st.integers(0, 10**5),
    rows=st.integers(1, 300),
    start=st.integers(0, 60_000),
    most=st.integers(0, 8192),
    captured=st.booleans(),
)
def test_demand_only_makes_steps_larger_within_the_limit(
    rate: float, backlog: int, long: int, rows: int, start: int, most: int, captured: bool
) -> None:
    table, step = CostTable(H200), StepShape(rows, rows * 1000)
    sizes = SIZES if captured else ()
    calm = choose_pace(table, step, start, most, sizes, TARGETS, Demand())
    found = choose_pace(table, step, start, most, sizes, TARGETS, Demand(rate, backlog, long))
    more = choose_pace(table, step, start, most, sizes, TARGETS, Demand(2 * rate, 2 * backlog, 2 * long))
    assert calm.num_tokens <= found.num_tokens <= more.num_tokens <= most
    assert calm.num_tokens >= min(most, MIN_PREFILL_TOKENS)
    if found.num_tokens > calm.num_tokens:
        assert table.predict_s(step.with_chunk(start, found.num_tokens)) <= TARGETS.queue_limit_s
    assert (found.bound is StepBound.MAX_STEP) == (found.num_tokens == most) or found.num_tokens == calm.num_tokens


def test_the_offered_load_is_the_rate_of_arrivals() -> None:
    load = OfferedLoad()
    assert load.tokens_per_s(5.0) == 0.0
    for number in range(2000):
        load.arrive(500, 100 + 0.1 * number)
    assert load.tokens_per_s(300) == pytest.approx(5000, rel=0.02)
    assert load.tokens_per_s(300 + WINDOW_S) == pytest.approx(5000 / 2.718, rel=0.02)
    for _ in range(300):
        load.admit(1000, 750)
    assert isclose(load.missed_share, 0.25, rel_tol=0.01)
    assert load.tokens_per_s(300 + WINDOW_S) == pytest.approx(1250 / 2.718, rel=0.02)


def test_the_first_arrivals_are_no_burst_and_a_clock_that_jumps_back_does_no_harm() -> None:
    load = OfferedLoad()
    load.arrive(1000, 7.0)
    assert load.tokens_per_s(7.0) <= 1100
    load.arrive(1000, 2.0)
    before = load.tokens_per_s(3.0)
    assert before == load.tokens_per_s(6.0) > 0


def test_few_steps_are_late_for_long_prompts() -> None:
    late, steps, num_late = LateSteps(), 100_000, 0
    for _ in range(steps):
        num_late += (allowed := late.allowed)
        late.note(5.0 if allowed else 0.0, long=allowed)
    assert num_late == pytest.approx(LATE_SHARE * steps, rel=0.01)
    for _ in range(8):
        late.note(20.0)
    assert not late.allowed
    for _ in range(round(3 / LATE_SHARE)):
        late.note()
    assert not late.allowed, "what a queue took is paid back first"


def test_late_steps_after_an_overload_do_not_go_on_for_ever() -> None:
    """Where steps were long for minutes, those for long prompts are as long: they cost as much as any, and do not say
    what is usual."""
    late, num_late = LateSteps(), 0
    for _ in range(5000):
        late.note(8.0)
    assert late.usual == pytest.approx(8.0, rel=0.1)
    for number in range(20_000):
        num_late += (allowed := late.allowed)
        late.note(6.5 if allowed else 2.0 if number % 10 == 0 else 0.5, long=allowed)
    assert late.usual == pytest.approx(2.0, rel=0.2)
    assert num_late <= LATE_SHARE * 20_000


def test_late_steps_cost_as_much_where_others_are_as_long() -> None:
    late, num_late = LateSteps(), 0
    for number in range(20_000):
        num_late += (allowed := late.allowed)
        late.note(6.5 if allowed else 6.0 if number % 10 == 0 else 0.5, long=allowed)
    assert late.usual > 5.0
    assert num_late <= LATE_SHARE / 5 * 20_000 + 8


def test_a_step_just_above_the_target_is_not_late_for_a_long_prompt() -> None:
    late = LateSteps()
    for _ in range(round(2 / LATE_SHARE)):
        late.note()
    for _ in range(100):
        late.note(1.1, long=True)
    assert late.allowed


@pytest.mark.parametrize("share", [0.005, 0.05, 0.5])
def test_steps_as_long_as_usual_are_not_late(share: float) -> None:
    """Steps of twice the target, for the load: they are late while they are 1 % of all or fewer."""
    generator, late = np.random.default_rng(7), LateSteps()
    for longer in generator.random(40_000) < share:
        late.note(2.0 if longer else 0.5)
    assert (late.usual > 1.7) == (share > 0.01)
    if share > 0.01:
        credit = 0
        for longer in generator.random(10_000) < share:
            credit += (allowed := late.allowed)
            late.note(8.0 if allowed else 2.0 if longer else 0.5, long=allowed)
        assert credit == pytest.approx(LATE_SHARE / 2 * 10_000, rel=0.25), "half as many where steps take twice as long"
