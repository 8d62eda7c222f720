"""The cost table predicts, learns and replays; chunks are sized by what it predicts."""

from dataclasses import replace
from math import hypot, inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.sched import cost_model as cost
from quire.sched.cost_model import Constants, CostTable, StepShape, roofline
from quire.sched.pacing import MIN_PREFILL_TOKENS, largest_next_chunk

# A step of 1 ms, weights read in 10 ms, 0.1 ms a token, 1 µs for a KV token read.
ROUND = Constants(1e-3, 10e-3, 1e-4, 1e-6, 1e-6)

SHAPES = st.builds(
    lambda rows, context, chunks: chunked(StepShape(rows, rows * context), chunks),
    st.integers(0, 300),
    st.integers(1, 4000),
    st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 600)), max_size=3),
)
USUAL = st.sampled_from([StepShape(40, 9000), StepShape(40, 9000, 256, 40_000), StepShape(0, 0, 512, 131_328)])
MEASURED = st.lists(st.tuples(USUAL | SHAPES, st.floats(1e-4, 10.0)), max_size=60)


def chunked(shape: StepShape, chunks: list[tuple[int, int]]) -> StepShape:
    for start, length in chunks:
        shape = shape.with_chunk(start, length)
    return shape


def taught(measured: list[tuple[StepShape, float]]) -> CostTable:
    table = CostTable(ROUND)
    for shape, seconds in measured:
        table.observe(shape, seconds)
    return table


# Predictions.


def test_a_chunk_reads_for_each_token_itself_and_all_before_it() -> None:
    assert StepShape().with_chunk(10, 3) == StepShape(0, 0, 3, 11 + 12 + 13)
    assert StepShape(2, 50).with_chunk(0, 1).with_chunk(7, 1) == StepShape(2, 50, 2, 1 + 8)


def test_an_unmeasured_table_is_the_roofline() -> None:
    table = CostTable(ROUND)
    assert table.predict_s(StepShape(num_rows=8, num_context=1000)) == pytest.approx(12e-3, rel=0.01)
    chunk = StepShape().with_chunk(100, 400)
    assert table.predict_s(chunk) == pytest.approx(1e-3 + hypot(10e-3, 40e-3) + (40_000 + 80_200) * 1e-6)
    both = table.predict_s(StepShape(num_rows=100)) - 1e-3
    assert both == pytest.approx(10e-3 * 2**0.5), "reading and computing overlap in part"


@pytest.mark.parametrize(
    ("dearer", "measured", "predicted"), [(1.25, 3.0, 1.25), (2.0, 3.0, 2.0), (2.0, 1.5, 1.5), (2.0, 0.5, 0.8)]
)
def test_steps_with_drafts_differ_from_those_without_by_little(dearer, measured, predicted) -> None:
    """A second a step without drafts, as predicted; with three drafts, `measured`."""
    table = CostTable(Constants(0.0, 1.0, 0.0, 0.0, 0.0, drafts_dearer=dearer))
    shape = StepShape(num_rows=1)
    for _ in range(5):
        table.observe(shape, 1.0)
        table.observe(shape.with_drafts(3), measured)
    assert table.predict_s(shape.with_drafts(3)) == pytest.approx(predicted)
    assert table.predict_s(shape) == 1.0


def test_a_draft_model_takes_a_pass_for_each_draft_of_a_row() -> None:
    """2 ms a pass, and 0.5 ms a row: 4 rows with 3 drafts each take 3 passes."""
    plain, drafting = (
        CostTable(ROUND),
        CostTable(replace(ROUND, seconds_per_draft_pass=2e-3, seconds_per_draft_token=5e-4)),
    )
    for number, seconds in ((0, 0.0), (1, hypot(2e-3, 5e-4)), (4, hypot(2e-3, 2e-3)), (12, 3 * hypot(2e-3, 2e-3))):
        shape = StepShape(num_rows=4).with_drafts(number)
        assert drafting.predict_s(shape) - plain.predict_s(shape) == pytest.approx(seconds)


def test_the_roofline_follows_from_model_and_device() -> None:
    """Eight billion 16-bit parameters, 128 KiB of KV a token, 400 TFLOP/s and 2 TB/s."""
    constants = roofline(
        num_parameters=8 * 10**9,
        weight_bytes=16 * 10**9,
        kv_bytes_per_token=131_072,
        flops_per_s=400e12,
        bytes_per_s=2e12,
        overhead_s=1e-3,
    )
    assert constants.seconds_per_step == 1e-3
    assert constants.seconds_per_weights == pytest.approx(8e-3)
    assert constants.seconds_per_token == pytest.approx(40e-6)
    assert constants.seconds_per_context_token == pytest.approx(65.536e-9)
    # 32 layers, 32 query heads of 128 against 8 KV heads: 4 * 32 * 32 * 128 operations.
    assert constants.seconds_per_attention_pair == pytest.approx(4 * 32 * 32 * 128 / 400e12)


# Learning.


def test_a_bucket_is_corrected_by_its_median_whatever_the_outliers() -> None:
    table, shape = CostTable(ROUND), StepShape(num_rows=8, num_context=1000)
    for factor in (2.0, 900.0, 2.0, 0.001, 2.0):
        table.observe(shape, 12e-3 * factor)
    assert table.predict_s(shape) == pytest.approx(24e-3)


def test_two_measurements_correct_nothing() -> None:
    table, shape = CostTable(ROUND), StepShape(num_rows=8, num_context=1000)
    table.observe(shape, 1.0)
    table.observe(shape, 1.0)
    assert (table.predict_s(shape), table.version) == (pytest.approx(12e-3, rel=0.01), 0)


def test_a_bucket_never_measured_takes_the_correction_of_its_kind() -> None:
    decode, chunk = StepShape(8, 1000), StepShape().with_chunk(0, 100)
    table = taught([(decode, 2 * CostTable(ROUND).predict_s(decode))] * 3)
    assert table.predict_s(StepShape(64, 100_000)) == pytest.approx(
        2 * CostTable(ROUND).predict_s(StepShape(64, 100_000))
    )
    assert table.predict_s(chunk) == CostTable(ROUND).predict_s(chunk)


def test_a_bucket_that_was_measured_keeps_its_own_correction() -> None:
    small, large = StepShape(2, 100), StepShape(200, 400_000)
    table = taught([(small, CostTable(ROUND).predict_s(small) * 3)] * 5)
    for _ in range(50):
        table.observe(large, CostTable(ROUND).predict_s(large))
    assert table.predict_s(small) == pytest.approx(3 * CostTable(ROUND).predict_s(small))
    assert table.predict_s(large) == pytest.approx(CostTable(ROUND).predict_s(large))


def test_a_table_follows_a_device_that_changes() -> None:
    shape = StepShape(8, 1000)
    table = taught([(shape, 12e-3)] * 100 + [(shape, 36e-3)] * (cost.WINDOW // 2 + 1))
    assert table.predict_s(shape) == pytest.approx(36e-3)


@given(MEASURED, st.lists(SHAPES, min_size=1, max_size=10))
def test_a_prediction_changes_only_with_the_version(
    measured: list[tuple[StepShape, float]], asked: list[StepShape]
) -> None:
    table = CostTable(ROUND)
    for shape, seconds in measured:
        before = (table.version, [table.predict_s(one) for one in [*asked, shape]])
        table.observe(shape, seconds)
        after = (table.version, [table.predict_s(one) for one in [*asked, shape]])
        assert after[0] >= before[0]
        assert after[0] > before[0] or after[1] == before[1]


@given(MEASURED, SHAPES)
def test_the_same_measurements_make_the_same_table(measured: list[tuple[StepShape, float]], asked: StepShape) -> None:
    first, second = taught(measured), taught(measured)
    assert (first.version, first.predict_s(asked)) == (second.version, second.predict_s(asked))


def test_a_steady_device_leaves_the_version_alone() -> None:
    shape = StepShape(8, 1000)
    table = taught([(shape, 24e-3)] * 3)
    version = table.version
    for i in range(100):
        table.observe(shape, 24e-3 * (1 + 0.04 * (-1) ** i))
    assert table.version == version > 0


def test_the_bucket_observed_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MAX_BUCKETS", 2)
    plain = CostTable(ROUND)
    shapes = [StepShape(rows, 1000) for rows in (1, 8, 64)]
    table = taught([(shape, 2 * plain.predict_s(shape)) for shape in shapes[:2] for _ in range(3)])
    table.observe(shapes[0], 2 * plain.predict_s(shapes[0]))
    version = table.version
    table.observe(shapes[2], 2 * plain.predict_s(shapes[2]))
    assert table.version == version + 1
    for _ in range(100):
        table.observe(shapes[2], 5 * plain.predict_s(shapes[2]))
    assert [table.predict_s(shape) / plain.predict_s(shape) for shape in shapes] == pytest.approx([2, 5, 5])


# Swap or recompute.


def test_recomputing_is_the_sum_of_its_chunks() -> None:
    table = CostTable(ROUND, largest_chunk=100)
    chunks = [(50, 100), (150, 100), (250, 30)]
    wanted = sum(table.predict_s(StepShape().with_chunk(start, length)) for start, length in chunks)
    assert table.recompute_s(50, 280) == pytest.approx(wanted)
    assert table.recompute_s(50, 50) == 0


def test_swapping_pays_when_there_and_back_is_cheaper() -> None:
    table = CostTable(ROUND)
    recompute_s = table.recompute_s(0, 1600)
    assert table.transfer_s(1) == inf and not table.cheaper_to_swap(0, 1600, 100)
    table.set_transfer(0.49 * recompute_s / 100)
    assert table.version == 1 and table.transfer_s(100) == pytest.approx(0.49 * recompute_s)
    assert table.cheaper_to_swap(0, 1600, 100)
    table.set_transfer(0.51 * recompute_s / 100)
    assert table.version == 2 and not table.cheaper_to_swap(0, 1600, 100)


# Sizing.

ROWS, CONTEXTS, STARTS = st.integers(0, 300), st.integers(0, 200_000), st.integers(0, 20_000)
LIMITS, TARGETS = st.integers(0, 3000), st.floats(1e-3, 0.5)


def largest_chunk(table: CostTable, num_rows: int, num_context: int, start: int, most: int, target_s: float) -> int:
    """For a step that otherwise only decodes."""
    return largest_next_chunk(table, StepShape(num_rows, num_context), start, most, target_s)


@given(ROWS, CONTEXTS, STARTS, LIMITS, TARGETS)
def test_by_the_roofline_a_chunk_is_the_largest_that_keeps_the_target(
    rows: int, context: int, start: int, most: int, target_s: float
) -> None:
    table, shape = CostTable(ROUND), StepShape(rows, context)
    length = largest_chunk(table, rows, context, start, most, target_s)
    least = min(most, MIN_PREFILL_TOKENS)
    assert least <= length <= most
    assert length == least or table.predict_s(shape.with_chunk(start, length)) <= target_s
    assert length == most or table.predict_s(shape.with_chunk(start, length + 1)) > target_s


@given(MEASURED, SHAPES, STARTS, LIMITS, TARGETS, TARGETS)
def test_whatever_was_measured_a_chunk_keeps_the_target_and_grows_with_it(
    measured: list[tuple[StepShape, float]], shape: StepShape, start: int, most: int, target_s: float, other_s: float
) -> None:
    table = taught(measured)
    lengths = [largest_next_chunk(table, shape, start, most, target) for target in sorted((target_s, other_s))]
    least = 0 if shape.num_chunk_tokens else min(most, MIN_PREFILL_TOKENS)
    for length, target in zip(lengths, sorted((target_s, other_s)), strict=True):
        assert least <= length <= most
        assert length == least or table.predict_s(shape.with_chunk(start, length)) <= target
    assert lengths[0] <= lengths[1]


@given(ROWS, CONTEXTS, STARTS, LIMITS, TARGETS, st.integers(0, 100), st.integers(0, 5000))
def test_more_work_in_a_step_leaves_shorter_chunks(
    rows: int, context: int, start: int, most: int, target_s: float, more_rows: int, more_context: int
) -> None:
    table = CostTable(ROUND)
    fewer = largest_chunk(table, rows + more_rows, context + more_context, start, most, target_s)
    assert fewer <= largest_chunk(table, rows, context, start, most, target_s)
    assert largest_chunk(table, rows, context, start + more_context, most, target_s) <= largest_chunk(
        table, rows, context, start, most, target_s
    )


@given(MEASURED, SHAPES, STARTS, LIMITS, TARGETS, st.lists(st.integers(1, 3000), max_size=6, unique=True).map(sorted))
def test_a_cut_chunk_has_a_captured_size(
    measured: list[tuple[StepShape, float]],
    shape: StepShape,
    start: int,
    most: int,
    target_s: float,
    captured_sizes: list[int],
) -> None:
    table = taught(measured)
    length = largest_next_chunk(table, shape, start, most, target_s, (*captured_sizes, 4000))
    least = 0 if shape.num_chunk_tokens else min(most, MIN_PREFILL_TOKENS)
    assert length in {least, most, *captured_sizes} and least <= length <= most
    assert length == least or table.predict_s(shape.with_chunk(start, length)) <= target_s
    larger = next((size for size in [*captured_sizes, most] if length < size <= most), None)
    assert larger is None or table.predict_s(shape.with_chunk(start, larger)) > target_s


def test_chunks_fill_a_step_one_after_the_other() -> None:
    """40 ms leave 390 tokens less their attention; the first chunk is cut off by its prompt, the third gets nothing."""
    table, shape = CostTable(ROUND), StepShape(num_rows=10, num_context=0)
    first = largest_next_chunk(table, shape, 0, 100, 40e-3)
    shape = shape.with_chunk(0, first)
    second = largest_next_chunk(table, shape, 0, 1000, 40e-3)
    shape = shape.with_chunk(0, second)
    assert first == 100 and table.predict_s(shape) <= 40e-3 < table.predict_s(shape.with_chunk(0, 2))
    assert largest_next_chunk(table, shape, 0, 1000, 40e-3) <= 1
