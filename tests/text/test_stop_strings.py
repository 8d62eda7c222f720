"""Stop strings: the same answer as looking through the whole text, wherever the pieces are cut."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.detokenizer import SequenceText, TextDelta
from quire.text.stop_strings import StopMatcher, StopStrings
from quire.text.tokenizer import Tokenizer

LETTERS = st.text("ab\n", max_size=40)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=5)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string that ends first in the whole text; of several, the longest."""
    found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    if not found:
        return text, None
    end, _, stop = min(found)
    return text[: end if include else end - len(stop)], stop


@settings(max_examples=500)
@given(text=LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 40), max_size=10), include=st.booleans())
def test_pieces_give_what_the_whole_text_gives(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    matcher = StopMatcher(StopStrings(stops), include)
    places = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    given_out, stopped = "", None
    for start, end in pairwise(places):
        released = matcher.push(text[start:end])
        given_out += released.text
        if released.stop is not None:
            stopped = released.stop
            break
    assert (given_out + matcher.finish(), stopped) == reference(text, stops, include)


@settings(max_examples=300)
@given(text=LETTERS, stops=STOPS)
def test_only_the_beginning_of_a_stop_string_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(StopStrings(stops))
    seen, given_out = "", ""
    for letter in text:
        released = matcher.push(letter)
        seen, given_out = seen + letter, given_out + released.text
        if released.stop is not None:
            return
        held = seen[len(given_out) :]
        assert seen == given_out + held
        longest = max((n for stop in stops for n in range(len(stop)) if seen.endswith(stop[:n])), default=0)
        assert len(held) == longest


def test_a_string_completed_too_early_does_not_stop() -> None:
    matcher = StopMatcher(StopStrings(["END"]))
    assert matcher.push("one END", armed=False) == ("one END", None)
    assert matcher.push(" two EN", armed=False) == (" two ", None)
    assert matcher.push("D three") == ("", "END")


def test_without_stop_strings_text_passes() -> None:
    assert StopMatcher(StopStrings([])).push("anything") == ("anything", None)


def sequence(tokenizer: Tokenizer, stops: list[str], **options: object) -> SequenceText:
    return SequenceText(tokenizer, StopStrings(stops), **options)  # type: ignore[arg-type]


def test_a_sequence_stops_in_the_middle_of_a_push_and_counts_its_tokens(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("one two three four")
    assert len(ids) == 4
    text = sequence(default_tokenizer, ["o thr"])  # begins and ends inside tokens
    assert text.push(ids[:2]) == TextDelta("one tw", None, 2)
    assert text.push(ids[2:]) == TextDelta("", "o thr", 3)
    assert text.push(ids) == TextDelta("", "o thr", 3)
    assert text.finish() == TextDelta("", "o thr", 3)
    assert text.text == "one tw"


def test_the_stop_string_is_part_of_the_text_if_asked(default_tokenizer: Tokenizer) -> None:
    text = sequence(default_tokenizer, ["o thr"], include_stop_in_output=True)
    assert text.push(default_tokenizer.encode("one two three four")) == TextDelta("one two thr", "o thr", 3)


def test_what_only_began_like_a_stop_string_comes_at_the_end(default_tokenizer: Tokenizer) -> None:
    text = sequence(default_tokenizer, ["three!"])
    assert text.push(default_tokenizer.encode("one two three")) == TextDelta("one two ", None, 3)
    assert text.finish() == TextDelta("three", None, 3)
    assert text.text == "one two three"


def test_a_stop_string_waits_for_the_least_number_of_tokens(default_tokenizer: Tokenizer) -> None:
    ids = default_tokenizer.encode("one two one two")
    text = sequence(default_tokenizer, ["two"], min_tokens=3)
    assert text.push(ids) == TextDelta("one two one ", "two", 4)
    assert sequence(default_tokenizer, ["two"], min_tokens=2).push(ids) == TextDelta("one ", "two", 2)


def test_a_stop_string_in_the_last_held_bytes_is_found(piece_tokenizer: Tokenizer) -> None:
    text = sequence(piece_tokenizer, ["€"])
    assert text.push(piece_tokenizer.encode("a€", add_special_tokens=False)) == TextDelta("a", None, 5)
    assert text.finish() == TextDelta("", "€", 5)


@pytest.mark.parametrize("stop", ["a" * 200 + "b", "ab" * 100])
def test_steps_do_not_grow_with_the_stop_string(stop: str) -> None:
    lookups = 0

    class Children(dict):  # type: ignore[type-arg]
        def get(self, *args: object) -> object:
            nonlocal lookups
            lookups += 1
            return super().get(*args)

    strings = StopStrings([stop])
    nodes = [strings.start]
    for node in nodes:
        nodes.extend(node.children.values())
        node.children = Children(node.children)
    assert StopMatcher(strings).push("a" * 5000).stop is None
    assert lookups <= 2 * 5000
