"""Drafters: what they propose, by hand, and against a search of every place."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import IntArray, Row
from quire.core.speculative import DRAFTERS
from quire.core.step import Drafts
from quire.runner.drafters import (
    MAX_NGRAM,
    MIN_NGRAM,
    Drafting,
    NgramDrafter,
    TreeDrafter,
    drafters_of,
    find_suffix,
)
from tests.runner.plans import row_start

ROW = Row(0)


def ids(*tokens: int) -> IntArray:
    return np.array(tokens, dtype=np.int32)


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=12))
def test_the_last_place_of_the_longest_suffix_is_found(text: list[int], tokens: list[int]) -> None:
    expected = None
    for length in range(min(MAX_NGRAM, len(tokens)), MIN_NGRAM - 1, -1):
        ends = [
            end for end in range(length, len(text) + 1) if text[end - length : end] == tokens[len(tokens) - length :]
        ]
        if ends:
            expected = (ends[-1], length)
            break
    assert find_suffix(ids(*text), ids(*tokens)) == expected


def test_of_places_where_all_tokens_are_alike_the_last_is_found() -> None:
    assert find_suffix(ids(1, 2, 3, 9, 1, 2, 3, 8), ids(1, 2, 3)) == (7, 3)
    assert find_suffix(ids(*range(12), *range(12), 0), ids(*range(12))) == (24, MAX_NGRAM)


def test_prompt_lookup_goes_on_as_the_text_did() -> None:
    drafter = NgramDrafter()
    assert drafter.propose(ROW, ids(6, 7, 8, 9, 4, 5, 6, 7, 8), 3).tolist() == [9], "three alike are one draft"
    assert drafter.propose(ROW, ids(5, 6, 7, 8, 9, 4, 5, 6, 7, 8), 3).tolist() == [9, 4], "four are two"
    assert drafter.propose(ROW, ids(5, 6, 7, 8, 9, 4, 5, 6, 7, 8), 1).tolist() == [9]
    assert drafter.propose(ROW, ids(7, 8, 9, 4, 5, 7, 8), 3).tolist() == [], "two may be chance"
    assert drafter.propose(ROW, ids(1, 2, 3, 4), 3).tolist() == []
    assert drafter.propose(ROW, ids(*[1, 2] * 4), 5).tolist() == [1, 2, 1, 2], "a loop goes on as a loop"
    assert drafter.propose(ROW, ids(5), 3).tolist() == []


def test_the_tree_is_followed_left_and_found_again() -> None:
    drafter = TreeDrafter()
    drafter.start(row_start(0, [1, 2])._replace(continuation=ids(3, 4, 5, 6, 7, 8)))
    assert drafter.propose(ROW, ids(1, 2), 2).tolist() == [3, 4]
    assert drafter.propose(ROW, ids(1, 2, 3, 4, 5), 2).tolist() == [6, 7]
    assert drafter.propose(ROW, ids(1, 2, 3, 4, 5, 9), 2).tolist() == [], "the row says something else"
    assert drafter.propose(ROW, ids(1, 2, 3, 4, 5, 9, 4, 5, 6), 2).tolist() == [7], "and returns"
    assert drafter.propose(ROW, ids(1, 2, 3, 4, 5, 9, 4, 5, 6, 7), 2).tolist() == [8]
    assert drafter.propose(ROW, ids(1, 2, 3, 4, 5, 9, 4, 5, 6, 7, 8), 2).tolist() == [], "at the end there is no more"
    drafter.release(ROW)
    assert drafter.propose(ROW, ids(1, 2), 2).tolist() == []


def test_a_row_that_has_returned_to_the_tree_is_followed_as_before() -> None:
    drafter = TreeDrafter()
    drafter.start(row_start(0, [1, 2])._replace(continuation=ids(*range(3, 20))))
    assert drafter.propose(ROW, ids(1, 2, 9, 3, 4, 5), 4).tolist() == [6], "three alike are one draft"
    assert drafter.propose(ROW, ids(1, 2, 9, 3, 4, 5, 6), 4).tolist() == [7, 8, 9, 10], "it says what was proposed"


def test_what_a_row_said_is_not_of_the_request_that_has_it_next() -> None:
    """The outcomes of the last steps are read late: before the row is another request's."""
    drafting = Drafting(2, drafters_of(["ngram"]))
    drafting.follow((), (row_start(0, [1, 2, 3], max_length=300), row_start(1, [4, 5, 6], max_length=300)))
    both = ids(0, 1)
    for tokens in ((7, 8), (7, 8)):
        drafting.append(both, np.array(tokens))
    drafting.follow((ROW,), (row_start(0, [5, 6, 9, 5], max_length=300),))
    drafting.append(both, np.array((6, 4)))
    drafting.append(both, np.array((9, 5)))
    drafting.append(both, np.array((5, 6)))
    found = drafting.propose(Drafts(both, ids(2, 2)))
    assert found is not None
    assert {row: tokens.tolist() for row, tokens in found.of_rows([ROW, Row(1)]).items()} == {0: [6, 9], 1: [8]}


def test_no_draft_is_behind_the_last_position_of_a_row() -> None:
    drafting = Drafting(4, drafters_of(["ngram"]))
    drafting.follow((), (row_start(1, [1] * 9, max_length=12), row_start(3, [5, 6, 7, 5, 6], max_length=300)))
    found = drafting.propose(Drafts(ids(1, 3), ids(5, 5)))
    assert found is not None and found.rows.tolist() == [1], "row 3 has too little to repeat"
    assert found.tokens.tolist() == [1, 1], "of 12 tokens the last is sampled from position 10"
    drafting.append(ids(1, 3), np.array([[1, 7], [1, 1], [1, 1], [0, 0], [0, 0]]))
    drafting.append(ids(3, 1), np.array([[8, 8], [0, 1], [1, 0], [0, 0], [0, 0]]))  # one had ended, one has no token
    found = drafting.propose(Drafts(ids(1, 3), ids(5, 5)))
    assert found is not None and found.counts.tolist() == [1, 1] and found.tokens.tolist() == [1, 5]


def test_steps_of_the_same_rows_are_read_in_order() -> None:
    """Tokens alone where every row has one, whole outcomes elsewhere."""
    drafting = Drafting(3, [], last := LastToken())
    drafting.follow((), (row_start(0, [1, 2]), row_start(2, [3])))
    rows = ids(2, 0)
    drafting.append(rows, ids(4, 5))
    drafting.append(rows, ids(6, 7))
    drafting.append(rows, np.array([[8, 9], [1, 1], [1, 0], [0, 0], [0, 0]]))
    drafting.append(rows, np.array([[10, 11], [1, 0], [1, 1], [0, 0], [0, 0]]))
    drafting.append(rows[:1], ids(12))
    drafting.propose(Drafts(ids(0, 2), ids(1, 1)))
    assert last.texts == [[1, 2, 5, 7], [3, 4, 6, 8, 10, 12]]


def test_the_tree_is_asked_before_the_own_text() -> None:
    drafting = Drafting(1, drafters_of(["ngram", "tree"]))
    start = row_start(0, [1] * 9)._replace(continuation=ids(9))
    drafting.follow((), (start,))
    found = drafting.propose(Drafts(ids(0), ids(2)))
    assert found is not None and found.tokens.tolist() == [9]
    drafting.follow((ROW,), (start._replace(continuation=ids()),))
    found = drafting.propose(Drafts(ids(0), ids(2)))
    assert found is not None and found.tokens.tolist() == [1, 1]


class LastToken:
    """A batch drafter that repeats the last token."""

    source = "draft"

    def __init__(self) -> None:
        self.asked: list[tuple[list[Row], list[int]]] = []
        self.texts: list[list[int]] = []  # the latest

    def propose(self, rows: Sequence[Row], counts: Sequence[int], texts: Sequence[IntArray]) -> list[IntArray]:
        self.asked.append((list(rows), list(counts)))
        self.texts = [text.tolist() for text in texts]
        return [np.repeat(text[-1:], count - 1) for count, text in zip(counts, texts, strict=True)]


def test_a_batch_drafter_is_asked_for_rows_that_have_no_other_drafts() -> None:
    """All at once, up to the last position of each; a row to which it proposes nothing has no drafts."""
    last = LastToken()
    drafting = Drafting(4, [NgramDrafter()], last)
    texts = ([1, 2, 3, 4, 1, 2, 3], [1, 2, 3], [4, 5, 6], [7, 8, 9])
    lengths = (40, 40, 6, 4)
    starts = [row_start(row, text, length) for row, (text, length) in enumerate(zip(texts, lengths, strict=True))]
    drafting.follow((), starts)
    found = drafting.propose(Drafts(ids(0, 1, 2, 3), ids(1, 3, 5, 5)))
    assert last.asked == [([Row(1), Row(2)], [3, 2])]
    assert found is not None and {row: list(tokens) for row, tokens in found.of_rows(map(Row, range(4))).items()} == {
        0: [4], 1: [3, 3], 2: [6],
    }  # fmt: skip
    assert [DRAFTERS[source] for source in found.sources] == ["ngram", "draft", "draft"]
