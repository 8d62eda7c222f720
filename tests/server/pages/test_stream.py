"""A streamed answer: events however the network cut them, what they add up to, and the figures below an answer."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tests.server.pages.javascript import Page


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    page = Page("stream.js")
    page.do("""
    globalThis.parse = (pieces) => { const parser = new EventParser(); return pieces.flatMap((piece) => parser.push(piece)); };
    globalThis.answered = (chunks) => {
      let ms = 1000;
      const answer = new Answer(() => ms);
      for (const chunk of chunks) { ms += 100; answer.add(chunk); }
      const { content, reasoning, toolCalls, empty } = answer;
      return { content, reasoning, toolCalls, empty, stats: answer.stats(), line: statsLine(answer.stats()) };
    };
    """)
    yield page


STREAM = 'data: {"a": 1}\n\n: keep-alive\n\ndata: first\ndata: second\r\n\r\nevent: x\ndata:tight\n\ndata: [DONE]\n\n'
EVENTS = ['{"a": 1}', "first\nsecond", "tight", "[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=8))
def test_events_do_not_depend_on_where_the_stream_was_cut(page: Page, cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    pieces = [STREAM[start:end] for start, end in itertools.pairwise(places)]
    assert page.run("parse(pieces)", pieces=pieces) == EVENTS


def chunk(**delta: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


def test_an_answer_is_the_sum_of_its_chunks(page: Page) -> None:
    call = {"index": 0, "id": "c", "function": {"name": "look", "arguments": '{"a'}}
    chunks = [
        chunk(role="assistant", content=""),
        chunk(reasoning="hm", reasoning_content="hm"),
        chunk(content="Hel"),
        chunk(content="lo"),
        chunk(tool_calls=[call]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": '": 1}'}}]),
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 8}}},
    ]  # fmt: skip
    got = page.run("answered(chunks)", chunks=chunks)
    assert (got["content"], got["reasoning"], got["empty"]) == ("Hello", "hm", False)
    assert got["toolCalls"] == [{"name": "look", "arguments": '{"a": 1}'}]
    # The first text came 200 ms after the request and the last 400 ms later: 8 more tokens in 0.4 s.
    assert got["stats"]["firstTokenMs"] == 200 and got["stats"]["tokensPerSecond"] == pytest.approx(20)
    assert got["line"] == "20 tok/s · first token 200 ms · 9 tokens · prompt 12, 8 cached"


def test_an_answer_without_usage_or_text_has_a_line_too(page: Page) -> None:
    assert page.run("answered([])")["empty"]
    assert page.run("answered([])")["line"] == "0 tokens"
    ended = {"choices": [{"delta": {"content": "a"}, "finish_reason": "length"}]}
    assert page.run("answered([it])", it=ended)["line"] == "first token 100 ms · 1 token · ended at the token limit"


def test_an_error_in_the_stream_is_thrown_in_its_words(page: Page) -> None:
    page.do(
        "globalThis.failure = (chunk) => { try { answered([chunk]); return null; } catch (error) { return error.message; } };"
    )
    assert page.run("failure(chunk)", chunk={"error": {"message": "The engine ended."}}) == "The engine ended."
    assert page.run("failure(chunk)", chunk=json.loads('{"error": {}}')) == "The answer broke off."
