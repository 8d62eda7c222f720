"""Which shapes of steps are recorded: they waste little, and come in the order of their use."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from quire.runner.graph_shapes import (
    MAX_VERIFIED,
    ShapeTable,
    StepSize,
    prompt_sizes,
    rows_beside,
    shapes_to_capture,
    verifying_shapes,
)


@given(max_rows=st.integers(1, 600), max_tokens=st.integers(1, 9000))
def test_shapes_waste_little_and_come_in_the_order_of_their_use(max_rows: int, max_tokens: int) -> None:
    wanted = shapes_to_capture(max_rows, max_tokens)
    assert len(wanted.first) <= 49
    shapes = [*wanted.first, *wanted.later]
    assert len(set(shapes)) == len(shapes) and len(shapes) <= 320
    assert shapes[:2] == list(dict.fromkeys([StepSize(max_rows), StepSize(1)])) or max_rows == 1
    decodes = [shape for shape in shapes if shape.chunks == 0]
    for rows in range(1, max_rows + 1):
        best = min(shape.rows for shape in decodes if shape.holds(StepSize(rows)))
        assert best < 2 * rows or rows == best, "a step computes less than twice what it needs"
    for tokens in (1, min(7, max_tokens), max_tokens // 3, max_tokens):
        if tokens:
            assert any(shape.holds(StepSize(max_rows, 1, tokens)) for shape in shapes), tokens
            assert any(shape.holds(StepSize(0, 1, tokens)) for shape in shapes), tokens


@given(max_rows=st.integers(1, 600), rows=st.integers(1, 256), drafts=st.integers(1, 7))
def test_rows_with_drafts_have_shapes_of_their_own(max_rows: int, rows: int, drafts: int) -> None:
    shapes = verifying_shapes(max_rows)
    assert len(shapes) == len(set(shapes)) <= 60 and all(shape.size <= MAX_VERIFIED for shape in shapes)
    rows = min(rows, max_rows)
    table = ShapeTable()
    table.replace([*shapes, StepSize(max_rows), StepSize(max_rows, 4, 64)])
    step = StepSize(rows, drafts=rows * drafts, queries=1 + drafts)
    found = table.smallest(step)
    if 4 * step.size <= MAX_VERIFIED:
        assert found is not None and found.size <= 2 * step.size + 64
    assert found is None or (found.holds(step) and found.drafts and not found.holds(StepSize(rows)))
    few = table.smallest(StepSize(rows, drafts=1, queries=2))
    assert few is None or few.size <= 2 * (rows + 1) + 64
    assert table.smallest(StepSize(rows)) == StepSize(max_rows), "no drafts: a decode"


@given(rows=st.integers(0, 300), max_tokens=st.integers(1, 9000))
def test_steps_with_prompts_end_where_tiles_do(rows: int, max_tokens: int) -> None:
    *sizes, most = prompt_sizes(rows, max_tokens)
    assert most == max_tokens and sizes == sorted(set(sizes)) and all(0 < size < most for size in sizes)
    for size in sizes:
        odd = (rows + size) >> ((rows + size) & -(rows + size)).bit_length() - 1
        assert odd in (1, 3, 5), (rows, size)
    for smaller, larger in itertools.pairwise([*sizes, most]):
        assert rows + larger <= 2 * (rows + smaller)


@given(max_rows=st.integers(1, 600), max_tokens=st.integers(1, 9000))
def test_what_a_chunk_is_cut_to_is_recorded(max_rows: int, max_tokens: int) -> None:
    wanted = shapes_to_capture(max_rows, max_tokens)
    shapes = {(shape.rows, shape.tokens) for shape in (*wanted.first, *wanted.later)}
    assert shapes >= {(rows, size) for rows in rows_beside(max_rows) for size in prompt_sizes(rows, max_tokens)}


@given(max_rows=st.integers(1, 600), max_tokens=st.integers(0, 9000))
def test_shapes_to_go_through_are_few_and_short_and_attend_in_every_way(max_rows: int, max_tokens: int) -> None:
    wanted = shapes_to_capture(max_rows, max_tokens)
    representative = wanted.representative
    assert len(set(representative)) == len(representative) < 20
    assert all(shape.tokens <= 2048 for shape in representative)
    assert {StepSize(1), StepSize(max_rows)} <= set(representative)
    assert {StepSize(rows) for rows in (16, 32, 64, 128) if rows < max_rows} <= set(representative), (
        "each has kernels of its own"
    )
    assert {shape.chunks for shape in wanted.first} <= {shape.chunks for shape in representative} or max_tokens > 2048


@given(max_rows=st.integers(1, 600), max_tokens=st.integers(1, 9000), data=st.data())
def test_usual_steps_fit_a_shape_captured_before_the_first_request(
    max_rows: int, max_tokens: int, data: st.DataObject
) -> None:
    """Of up to 16 chunks, 64 if large, with any number of rows. A step computes about twice what it needs at most."""
    first = ShapeTable()
    first.replace(shapes_to_capture(max_rows, max_tokens).first)
    rows = data.draw(st.integers(0, max_rows))
    tokens = data.draw(st.integers(1, max_tokens))
    chunks = data.draw(st.integers(1, min(64 if tokens >= 1024 else 16, max_rows, tokens)))
    step = StepSize(rows, chunks, tokens)
    fitting = first.smallest(step)
    if rows <= 128 or max_rows <= 128:
        assert fitting is not None and fitting.size <= 2 * step.size + 256
    decode = first.smallest(StepSize(max(rows, 1)))
    assert decode is not None and (decode.rows <= 4 * max(rows, 1) or decode.rows == 8 or rows > 128)


@given(st.lists(st.builds(StepSize, st.integers(0, 9), st.integers(0, 3), st.integers(0, 400))))
def test_the_smallest_shape_that_holds_a_step_is_found(shapes: list[StepSize]) -> None:
    found = ShapeTable()
    found.replace(shapes)
    for step in (StepSize(3), StepSize(0, 1, 5), StepSize(4, 2, 90), StepSize(9, 3, 400)):
        holding = [shape for shape in shapes if shape.holds(step)]
        smallest = min((shape.order() for shape in holding), default=None)
        got = found.smallest(step)
        assert (None if got is None else got.order()) == smallest
