"""Pacing: step sizes from the offered load and two latency targets, the estimate of the load, late steps."""

from dataclasses import replace
from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sched.cost_model import Constants, CostTable, StepShape
from quire.sched.pacing import (
    EFFICIENT,
    LATE_SHARE,
    LOAD_STRETCH,
    MIN_PREFILL_TOKENS,
    QUEUE_EFFICIENT,
    TOLERATED_SHARE,
    UTILIZATION,
    WINDOW_S,
    Demand,
    LateSteps,
    OfferedLoad,
    Pace,
    StepBound,
    Targets,
    UnchunkedLatency,
    choose_pace,
    largest_next_chunk,
)

# An 8B model on an H200: 4 ms for the weights, 21 µs a token.
H200 = Constants(3e-4, 3.9e-3, 2.1e-5, 3.2e-8, 8e-10)
ROWS = StepShape(num_rows=16, num_context=16_000)
TARGETS = Targets(itl_s=0.012, ttft_s=0.036, limit_s=0.072, queue_limit_s=0.1)
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


def test_a_long_prompt_that_nothing_waits_for_has_longer_steps_but_not_the_longest() -> None:
    found = pace(Demand(longest=60_000))
    assert found.bound is StepBound.LONG_PROMPT and found.late
    assert TARGETS.itl_s < seconds(found.num_tokens) <= LOAD_STRETCH * TARGETS.itl_s
    assert pace(Demand(longest=300)).bound is StepBound.ITL


@pytest.mark.parametrize(
    "demand", [Demand(longest=60_000), Demand(backlog=2000), Demand(tokens_per_s=UTILIZATION * 38_000)], ids=str
)
def test_where_gaps_would_be_long_anyway_steps_may_be_longer_but_not_the_longest(demand: Demand) -> None:
    """Each step takes 4 ms whatever it holds: larger ones carry more, up to 60 ms and beyond."""
    table = CostTable(replace(H200, seconds_per_step=4e-3))

    def timed(tolerated_s: float, asked: Demand = demand) -> tuple[Pace, float]:
        targets = TARGETS._replace(tolerated_s=tolerated_s)
        found = choose_pace(table, ROWS, 0, MOST, SIZES, targets, asked)
        return found, table.predict_s(ROWS.with_chunk(0, found.num_tokens))

    (calm, calm_s), (found, found_s) = timed(0.0), timed(0.06)
    assert calm_s < found_s <= 0.06
    assert found.bound is calm.bound and not found.late
    assert timed(0.06, Demand()) == timed(0.0, Demand()), "nothing needs it"
    assert timed(10.0, Demand(1e6, 10**6, 10**6))[1] <= TARGETS.queue_limit_s


def test_without_decoding_rows_a_step_has_the_efficient_size() -> None:
    found = pace(Demand(), step=StepShape())
    assert found.bound is StepBound.EFFICIENT and 496 <= found.num_tokens < 4080
    assert choose_pace(CostTable(H200), StepShape(), 0, 100, (), TARGETS, Demand()) == Pace(100, StepBound.MAX_STEP)


def test_without_a_ttft_target_the_itl_target_is_kept() -> None:
    assert pace(Demand(1e6, 10**6, 10**6), TARGETS._replace(ttft_s=None)).bound is StepBound.ITL


@given(
    rate=st.floats(0, 1e6),
    backlog=st.integers(0, 10**6),
    longest=st.integers(0, 10**5),
    rows=st.integers(1, 300),
    start=st.integers(0, 60_000),
    most=st.integers(0, 8192),
    captured=st.booleans(),
    tolerated_s=st.floats(0, 0.3),
)
def test_demand_only_makes_steps_larger_within_the_limit(
    rate: float, backlog: int, longest: int, rows: int, start: int, most: int, captured: bool, tolerated_s: float
) -> None:
    table, step = CostTable(H200), StepShape(rows, rows * 1000)
    sizes = SIZES if captured else ()
    targets = TARGETS._replace(tolerated_s=tolerated_s)
    calm = choose_pace(table, step, start, most, sizes, targets, Demand())
    found = choose_pace(table, step, start, most, sizes, targets, Demand(rate, backlog, longest))
    more = choose_pace(table, step, start, most, sizes, targets, Demand(2 * rate, 2 * backlog, 2 * longest))
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
    late, steps = LateSteps(), 100_000
    slow, num_late = Pace(1000, StepBound.LONG_PROMPT, late=True), 0
    for _ in range(steps):
        num_late += late.allowed
        late.note(slow if late.allowed else None)
    assert num_late == pytest.approx(LATE_SHARE * steps, rel=0.01)
    for _ in range(50):
        late.note(slow._replace(bound=StepBound.BACKLOG))
    assert not late.allowed
    for _ in range(round(5 / LATE_SHARE)):
        late.note(None)
    assert not late.allowed, "what a queue took is paid back first"


def gaps(*prompts: tuple[int, float], decoded: int = 10_000) -> UnchunkedLatency:
    """Of so many gaps, prompts make some as long as their step: each by rows and seconds."""
    found = UnchunkedLatency()
    found.decode(decoded)
    for rows, step_s in prompts:
        found.prompt(rows, 1, step_s, 0.0)
    return found


@pytest.mark.parametrize(
    ("prompts", "percentile_s"),
    [
        ([], 0.0),
        ([(10, 0.2)] * 9, 0.0),  # 0.9 % of the gaps
        ([(10, 0.2)] * 11, 0.2),
        ([(10, 0.4)] * 9 + [(10, 0.1)] * 9, 0.1),
        ([(10, 0.1)] * 99 + [(10, 0.4)] * 11, 0.4),
        ([(99, 0.2)], 0.0),
        ([(101, 0.2)], 0.2),  # gaps are counted, not steps
    ],
)
def test_the_percentile_is_that_of_the_gaps_that_whole_prompts_would_make(
    prompts: list[tuple[int, float]], percentile_s: float
) -> None:
    assert gaps(*prompts).percentile_s == pytest.approx(percentile_s, rel=0.1)


def test_a_prompt_of_several_steps_makes_as_many_gaps() -> None:
    found = gaps()
    found.prompt(10, 11, 0.2, 0.0)
    assert found.percentile_s == pytest.approx(0.2, rel=0.1)


def test_of_few_gaps_no_percentile_is_known_and_old_ones_are_forgotten() -> None:
    assert gaps((10, 0.2), decoded=200).percentile_s == 0.0
    found = gaps(*[(10, 0.2)] * 11)
    found.decode(1000)
    assert found.percentile_s == 0.0, "those without a prompt count since"
    found = gaps(*[(10, 0.2)] * 20)
    found.prompt(1, 1, 0.1, WINDOW_S)
    assert found.percentile_s > 0.1, "all grow old alike"
    found.decode(10_000)
    assert found.percentile_s == 0.0
    found.prompt(1, 1, 0.1, 0.0)  # a clock that jumps back does no harm
    found.prompt(1, 1, 0.1, 1e9)
    assert found.percentile_s == 0.0


def test_sums_do_not_depend_on_when_steps_are_noted() -> None:
    once, twice = UnchunkedLatency(), UnchunkedLatency()
    for number in range(50):
        once.decode(777)
        for part in (700, 77):
            twice.decode(part)
        for each in (once, twice):
            each.prompt(10, 1, 0.2, 0.37 * number)
    assert once._total == twice._total


def test_a_part_of_the_percentile_is_tolerated_where_it_is_more_than_any_load_allows() -> None:
    found = gaps(*[(10, 0.2)] * 11)
    assert found.tolerated_s(0.012) == TOLERATED_SHARE * found.percentile_s
    assert found.tolerated_s(1.001 * TOLERATED_SHARE * found.percentile_s / LOAD_STRETCH) == 0.0
