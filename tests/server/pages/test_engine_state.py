"""The logic of the page /engine: recent steps, speeds, percentiles of a metrics page, the grid of the map."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from tests.server.pages.javascript import Page


@pytest.fixture
def page() -> Iterator[Page]:
    page = Page("engine_state.js")
    page.do("""
    globalThis.timeline = new Timeline();
    globalThis.step = (number, end_s, decodes = "1", prefills = []) => ({ step: number, end_s, seconds: 0.1, decodes, prefills, num_preemptions: 0 });
    """)
    yield page


def test_the_timeline_keeps_the_newest_steps(page: Page) -> None:
    page.do("for (let i = 0; i < 1000; i++) timeline.add([step(i, i / 10)]);")
    assert page.run("[timeline.steps.length, timeline.steps[0].step, timeline.last]") == [400, 600, 999]
    page.do("timeline.add([step(3, 200)]);")
    assert page.run("timeline.steps.map((each) => each.step)") == [3], "another engine has started"


def test_a_state_is_the_one_before_with_what_changed(page: Page) -> None:
    page.do("""
    globalThis.first = stateAfter(null, { since: -1, rows: [1], step: 3, steps: [step(2, 1), step(3, 2)] }, timeline);
    globalThis.second = stateAfter(first, { since: 3, step: 4, steps: [step(4, 3)] }, timeline);
    """)
    assert page.run("first") == {"rows": [1], "step": 3} and page.run("second") == {"rows": [1], "step": 4}
    assert page.run("timeline.steps.map((each) => each.step)") == [2, 3, 4]
    page.do("stateAfter(second, { since: 4, steps: [] }, timeline);")
    assert page.run("timeline.last") == 4, "nothing happened"
    page.do("stateAfter(second, { since: -1, steps: [] }, timeline);")
    assert page.run("timeline.last") == -1, "another engine, without a step"
    page.do("stateAfter(second, { since: -1, steps: [step(7, 1)] }, timeline);")
    assert page.run("timeline.steps.map((each) => each.step)") == [7]


def test_a_stream_that_breaks_again_and_again_is_opened_less_often(page: Page) -> None:
    assert page.run("[1, 2, 3, 4, 5, 6, 7, 2000].map((broken) => retryMs(broken, 0, 0))") == [
        500, 1000, 2000, 4000, 8000, 15000, 15000, 15000,
    ]  # fmt: skip
    assert page.run("[retryMs(1, 5, 0), retryMs(6, 5, 0)]") == [5000, 15000], "not before the server said"
    assert page.run("[retryMs(1, 0, 0.99), retryMs(9, 60, 0.99)]") == pytest.approx([665, 79800])


def test_speeds_are_of_the_last_seconds(page: Page) -> None:
    assert page.run("timeline.speed(10)") == {"decodePerS": 0, "prefillPerS": 0, "stepMs": None}
    page.do(
        "timeline.add([step(0, 1, '111'), step(1, 8.1, '11', [[2, 30]]), step(2, 8.2, '011'), step(3, 10, '100')]);"
    )
    assert page.run("timeline.steps.map((each) => each.decodes)") == [[0, 1, 2], [0, 1], [1, 2], [0]]
    speed = page.run("timeline.speed(10)")
    # From 8.0 to 10: five decoded tokens and 30 of a prompt in two seconds.
    assert speed["decodePerS"] == pytest.approx(2.5) and speed["prefillPerS"] == pytest.approx(15)
    assert speed["stepMs"] == pytest.approx(100)


def test_percentiles_follow_the_page_of_metrics(page: Page) -> None:
    registry = CollectorRegistry()
    histogram = Histogram(
        "quire_time_to_first_token_seconds", "x", ["kind"], buckets=(0.1, 1.0, 10.0), registry=registry
    )
    empty = generate_latest(registry).decode()
    for seconds in (0.05, 0.05, 0.5, 5.0):
        histogram.labels("a").observe(seconds)
    first = generate_latest(registry).decode()
    name = "time_to_first_token_seconds"
    assert page.run("buckets(page, name)", page=first, name=name)[:3] == [[0.1, 2], [1, 3], [10, 4]]
    assert page.run("quantile(buckets(a, name), buckets(b, name), 0.5)", a=empty, b=first, name=name) == pytest.approx(
        0.1
    )
    assert page.run("quantile([], [], 0.5)") is None
    histogram.labels("b").observe(100)
    later = generate_latest(registry).decode()
    assert page.run("quantile(buckets(a, name), buckets(b, name), 0.5)", a=first, b=later, name=name) == 10, (
        "beyond the last bound"
    )
    assert page.run("quantile(buckets(a, name), buckets(a, name), 0.5)", a=later, name=name) is None, "nothing came"


@pytest.mark.parametrize("count", [1, 7, 400, 2048])
@pytest.mark.parametrize("width, height", [(1160, 176), (358, 176), (2000, 300)])
def test_the_map_fits_its_canvas(page: Page, count: int, width: int, height: int) -> None:
    grid = page.run(f"grid({count}, {width}, {height})")
    assert grid["columns"] * grid["side"] <= width and grid["rows"] * grid["side"] <= height
    assert grid["columns"] * grid["rows"] >= count


def test_neighbouring_rows_are_one_rectangle(page: Page) -> None:
    assert page.run("runs([5, 0, 1, 2, 9, 6])") == [[0, 3], [5, 2], [9, 1]]
    assert page.run("runs([])") == []


def test_times_are_short(page: Page) -> None:
    shown = page.run("[null, 0.0012, 0.25, 3.14, 600].map(duration)")
    assert shown == ["–", "1.2 ms", "250 ms", "3.1 s", "10.0 min"]
    assert page.run("[0, 1, 2].map(hue)") == [0, 138, 275]


def test_the_icicle_nests_and_shares_the_width(page: Page) -> None:
    nodes = [[-1, 4, 1, False], [-1, 2, 0, False], [0, 3, 5, False], [0, 3, 0, True], [2, 1, 2, False]]
    placed = page.run("icicle(nodes)", nodes=nodes)
    assert [node["level"] for node in placed] == [0, 0, 1, 1, 2]
    assert [node["hits"] for node in placed] == [8, 0, 7, 0, 2], "hits below passed through those above"
    for node in placed:
        above = placed[node["parent"]] if node["parent"] >= 0 else {"x": 0, "width": 1}
        assert above["x"] <= node["x"] and node["x"] + node["width"] <= above["x"] + above["width"] + 1e-9
    for level in range(3):
        row = sorted((node["x"], node["width"]) for node in placed if node["level"] == level)
        assert all(x + width <= after + 1e-9 for (x, width), (after, _) in pairwise(row)), "none overlap"
    assert page.run("icicle([])") == []
