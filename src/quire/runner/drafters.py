"""Drafters: cheap proposals for a row's next tokens, which a step then verifies (speculative decoding).

    ngram    prompt lookup: what followed the last tokens of a row where they occurred before, in prompt or output; the
             more of them are alike, the more is proposed
    tree     what an earlier request with the same prefix went on with, as the prefix tree remembers it (the plan hands
             it to the row when the row starts); followed for as long as the row says the same, and found again where
             the row returns to it
    forced   the text that the grammar of a row forces, as the plan names it (jump forward)
    draft    a smaller model, for the rows to which no other drafter proposes anything (`draft_model`)

A wrong draft costs time and never changes an output. Host side, numpy: for runners that compute a step before `launch`
returns, and so know every token when the next is launched. Does not depend on torch.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IntArray, Row
from quire.core.speculative import DRAFTERS, MODEL_DRAFTERS
from quire.core.step import Drafts, ForcedTokens, RowStart

# The default model on stories and quotations, drawn at temperature 0.8: after 2 tokens that occurred before, the next
# one is the same in 37 % of the places, after 3 in 50 %, after 12 in 90 %; greedy in 65, 75 and 96 %. The number of
# tokens that are the same from there on grows about as fast as the number alike before.
MIN_NGRAM = 3
MAX_NGRAM = 12
_MAX_UNREAD = 64  # steps
_NOTHING: IntArray = np.empty(0, dtype=np.int32)


class Drafter(Protocol):
    """One way to propose tokens."""

    source: str  # its name in `DRAFTERS`

    def start(self, row_start: RowStart) -> None: ...

    def release(self, row: Row) -> None: ...

    def propose(self, row: Row, tokens: IntArray, count: int) -> IntArray:
        """Up to `count` tokens that may follow these, which are all that the row has."""


class BatchDrafter(Protocol):
    """Proposes tokens of many rows at once."""

    source: str

    def propose(self, rows: Sequence[Row], counts: Sequence[int], texts: Sequence[IntArray]) -> list[IntArray]:
        """Up to `counts[i]` tokens that may follow `texts[i]`, which are all that row `rows[i]` has."""


class NgramDrafter:
    """Prompt lookup in the row's own tokens."""

    source = "ngram"

    def start(self, row_start: RowStart) -> None:
        pass

    def release(self, row: Row) -> None:
        pass

    def propose(self, row: Row, tokens: IntArray, count: int) -> IntArray:
        found = find_suffix(tokens[:-1], tokens)
        if found is None:
            return _NOTHING
        following, count = tokens[found.end :], min(count, found.num_likely)
        return np.resize(following, count) if len(following) < count else following[:count]  # a loop goes on as a loop


class TreeDrafter:
    """Follows the continuation that the prefix tree had when the row started."""

    __slots__ = ("_continuations", "_places")
    source = "tree"

    def __init__(self) -> None:
        self._continuations: dict[Row, IntArray] = {}
        self._places: dict[Row, _Place] = {}

    def start(self, row_start: RowStart) -> None:
        self.release(row_start.row)
        if len(row_start.continuation):
            self._continuations[row_start.row] = row_start.continuation
            self._places[row_start.row] = _Place(len(row_start.tokens), 0)

    def release(self, row: Row) -> None:
        self._continuations.pop(row, None)
        self._places.pop(row, None)

    def propose(self, row: Row, tokens: IntArray, count: int) -> IntArray:
        continuation = self._continuations.get(row)
        if continuation is None:
            return _NOTHING
        place = self._places[row]
        said = tokens[place.num_tokens :]
        start = place.start + len(said)
        if not np.array_equal(said, continuation[place.start : start]):
            found = find_suffix(continuation, tokens)
            if found is None:
                return _NOTHING
            start, count = found.end, min(count, found.num_likely)
        self._places[row] = _Place(len(tokens), start)
        return continuation[start : start + count]


class _Place(NamedTuple):
    """With this many tokens, the row goes on as its continuation does from `start` on."""

    num_tokens: int
    start: int


class NgramMatch(NamedTuple):
    """Where some last tokens end in a text, and how many they are."""

    end: int
    length: int

    @property
    def num_likely(self) -> int:
        """Tokens that may be the same from there on."""
        return self.length - MIN_NGRAM + 1


def find_suffix(text: IntArray, tokens: IntArray) -> NgramMatch | None:
    """The last occurrence of the longest suffix of the tokens, of MIN_NGRAM to MAX_NGRAM of them."""
    longest = min(MAX_NGRAM, len(tokens))
    if longest < MIN_NGRAM or len(text) < MIN_NGRAM:
        return None
    ends = np.flatnonzero(text == tokens[-1])
    for number in range(1, longest):
        longer = ends[ends >= number]
        longer = longer[text[longer - number] == tokens[-1 - number]]
        if not len(longer):
            return None if number < MIN_NGRAM else NgramMatch(int(ends[-1]) + 1, number)
        ends = longer
    return NgramMatch(int(ends[-1]) + 1, longest)


class Drafted(NamedTuple):
    """The proposals of a step. A row's drafts are in order, one row after the other."""

    rows: IntArray  # [n], each with at least one
    counts: NDArray[np.int64]  # [n]
    tokens: IntArray  # [sum of counts]
    sources: IntArray  # [n]: of the drafts, by place in `DRAFTERS`
    # [n]: whether a row's drafts are from its text and not by a draft model or a head, where only the device knows;
    # once they are verified.
    by_text: Callable[[], NDArray[np.bool_]] | None = None

    @property
    def final_sources(self) -> IntArray:
        """`sources`, once the drafts are verified."""
        if self.by_text is None:
            return self.sources
        from_model = np.isin(self.sources, [DRAFTERS.index(name) for name in MODEL_DRAFTERS])
        return np.where(from_model & self.by_text(), DRAFTERS.index("text"), self.sources).astype(np.int32)

    def of_rows(self, rows: Iterable[Row]) -> dict[Row, IntArray]:
        """The drafts of those of these rows that have any."""
        by_row = dict(zip(self.rows.tolist(), np.split(self.tokens, np.cumsum(self.counts)[:-1]), strict=True))
        return {row: by_row[row] for row in rows if row in by_row}

    def in_order(self, rows: IntArray) -> tuple[IntArray, NDArray[np.int64]]:
        """The number of drafts of each of these rows, and all their drafts, one row after the other."""
        if len(rows) == len(self.rows) == 1 and rows.item() == self.rows.item():
            return self.counts.astype(np.int32), self.tokens.astype(np.int64)
        by_row = self.of_rows(Row(row) for row in rows.tolist())
        counts = np.array([len(by_row.get(row, _NOTHING)) for row in rows.tolist()], dtype=np.int32)
        return counts, np.concatenate([by_row[row] for row in rows.tolist() if row in by_row], dtype=np.int64)


class Drafting:
    """The tokens of every row, and the drafters that are asked for each, in order, until one proposes something; a
    batch drafter comes last. Without drafters, rows have only the drafts that a plan names."""

    def __init__(self, max_rows: int, drafters: Sequence[Drafter], batch_drafter: BatchDrafter | None = None) -> None:
        self._drafters = drafters
        self._batch_drafter = batch_drafter
        self._tokens: IntArray = np.zeros((max_rows, 256), dtype=np.int32)  # wide enough for the longest row so far
        self._lengths: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)
        self._limits: NDArray[np.int64] = np.zeros(max_rows, dtype=np.int64)  # tokens that a row may have
        self._unread: list[tuple[IntArray, NDArray[np.int64] | IntArray]] = []  # the latest calls of `append`

    def follow(self, releases: tuple[Row, ...], starts: tuple[RowStart, ...]) -> None:
        """Rows are released and started."""
        if releases or starts:
            self._catch_up()
        for row in releases:
            for drafter in self._drafters:
                drafter.release(row)
        for row_start in starts:
            row, known = row_start.row, len(row_start.tokens)
            if row_start.max_length > self._tokens.shape[1]:
                width = max(row_start.max_length, 2 * self._tokens.shape[1])
                self._tokens = np.pad(self._tokens, ((0, 0), (0, width - self._tokens.shape[1])))
            self._tokens[row, :known] = row_start.tokens
            self._lengths[row], self._limits[row] = known, row_start.max_length
            for drafter in self._drafters:
                drafter.start(row_start)

    def append(self, rows: IntArray, outcome: NDArray[np.int64] | IntArray) -> None:
        """Rows, all distinct, were sampled. outcome: [5, rows]: token, alive, finite, stop, length; or [rows]: the
        tokens, if each row has one."""
        self._unread.append((rows, outcome))
        if len(self._unread) == _MAX_UNREAD:
            self._catch_up()

    def append_passes(self, rows: IntArray, tokens: IntArray, numbers: IntArray) -> None:
        """Row `rows[i]` emitted `tokens[i]`, after `numbers[i]` others of the same step."""
        self._catch_up()
        self._tokens[rows, self._lengths[rows] + numbers] = tokens
        np.add.at(self._lengths, rows, 1)

    def _catch_up(self) -> None:
        """Read what was sampled since the last call: most steps propose nothing. Steps of the same rows together."""
        for (_, num_axes), steps in groupby(self._unread, key=lambda step: (id(step[0]), step[1].ndim)):
            (rows, first), *others = steps
            outcomes = np.concatenate([first, *[outcome for _, outcome in others]]).reshape(-1, *first.shape)
            tokens = outcomes if num_axes == 1 else outcomes[:, 0]  # [steps, rows]
            emitted = np.ones_like(tokens, np.bool_) if num_axes == 1 else outcomes[:, 1:3].all(axis=1)
            positions = self._lengths[rows] + np.cumsum(emitted, axis=0) - 1
            number, place = np.nonzero(emitted)
            self._tokens[rows[place], positions[number, place]] = tokens[number, place]
            self._lengths[rows] += np.count_nonzero(emitted, axis=0)
        self._unread.clear()

    def propose(self, drafts: Drafts, forced: Iterable[ForcedTokens] = ()) -> Drafted | None:
        """Drafts for each row, at most its number, none behind its last position; None: no row has any. What a grammar
        forces comes first."""
        self._catch_up()
        found: dict[Row, IntArray] = {}
        source_of: dict[Row, str] = {}
        asked: dict[Row, int] = {}  # rows to which nothing is proposed yet
        by_row = {span.row: span for span in forced}
        for number, most in zip(drafts.rows.tolist(), drafts.counts.tolist(), strict=True):
            row, length = Row(number), int(self._lengths[number])
            count = min(most, int(self._limits[number]) - 1 - length)
            if count <= 0:
                continue
            tokens = by_row[row].after(length)[:count] if row in by_row else _NOTHING
            found[row], source_of[row] = (tokens, "grammar") if len(tokens) else self._ask(row, count)
            if not len(found[row]):
                asked[row] = count
        if asked and self._batch_drafter is not None:
            texts = [self._text(row) for row in asked]
            proposed = self._batch_drafter.propose(list(asked), list(asked.values()), texts)
            found.update(zip(asked, proposed, strict=True))
            source_of |= dict.fromkeys(asked, self._batch_drafter.source)
        found = {row: tokens for row, tokens in found.items() if len(tokens)}
        if not found:
            return None
        rows = np.array(list(found), dtype=np.int32)
        counts = np.array([len(tokens) for tokens in found.values()], dtype=np.int64)
        sources = np.array([DRAFTERS.index(source_of[row]) for row in found], dtype=np.int32)
        return Drafted(rows, counts, np.concatenate(list(found.values())), sources)

    def _text(self, row: Row) -> IntArray:
        return self._tokens[row, : self._lengths[row]]

    def _ask(self, row: Row, count: int) -> tuple[IntArray, str]:
        """Drafts, and whose they are."""
        tokens = self._text(row)
        for drafter in self._drafters:
            proposed = drafter.propose(row, tokens, count)
            if len(proposed):
                return proposed, drafter.source
        return _NOTHING, ""


def drafters_of(names: Iterable[str]) -> list[Drafter]:
    """The drafters with these names; the tree comes first, since it proposes only what it was handed."""
    made: dict[str, Drafter] = {"tree": TreeDrafter(), "ngram": NgramDrafter()}
    return [drafter for name, drafter in made.items() if name in set(names)]
