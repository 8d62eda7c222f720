"""Prompt lookup in hindsight against a plain dictionary, and what the governor makes of it."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.ids import Row
from quire.core.step import StepResult
from quire.sched.cost_model import Constants, CostTable, StepShape
from quire.sched.lookup_hits import LookupHits
from quire.sched.speculation import DraftGovernor, SpeculationPolicy

GPU = Constants(0.0, 4e-3, 2e-5, 1e-7, 0.0, context_per_draft=0.0)  # as an H200 with 8 billion weights
NOTHING = np.empty(0, dtype=np.int32)
TEXTS = st.lists(st.integers(0, 4), max_size=12)


class Dictionary:
    """The reference: what followed each pair of tokens last, by row."""

    def __init__(self) -> None:
        self.texts: dict[int, list[int]] = {}
        self.followers: dict[tuple[int, int, int], int] = {}

    def enter(self, row: int, text: list[int]) -> None:
        for place in range(2, len(text)):
            self.followers[row, text[place - 2], text[place - 1]] = text[place]

    def start(self, row: int, tokens: list[int], continuation: list[int]) -> None:
        self.followers = {key: token for key, token in self.followers.items() if key[0] != row}
        self.texts[row] = [0, 0, *tokens]
        self.enter(row, tokens)
        self.enter(row, tokens[-2:] + continuation)

    def note(self, row: int, token: int) -> bool:
        text = self.texts[row]
        context = (row, text[-2], text[-1])
        hit = self.followers.get(context) == token
        self.followers[context] = token
        text.append(token)
        return hit


@settings(max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 2), TEXTS, TEXTS, TEXTS), min_size=1, max_size=6))
def test_hits_are_those_of_a_dictionary(rounds: list[tuple[int, list[int], list[int], list[int]]]) -> None:
    """Rows start with texts and continuations, go on, and start anew: nothing of before is found."""
    hits, expected = LookupHits(3), Dictionary()
    for row, tokens, continuation, following in rounds:
        hits.start(Row(row), np.array(tokens, np.int32), np.array(continuation, np.int32))
        expected.start(row, tokens, continuation)
        for token in following:
            rows = np.array(sorted(expected.texts), dtype=np.intp)  # every row goes on, each with another token
            came = [(token + int(each)) % 5 for each in rows]
            found = hits.note(rows, np.array(came, np.int32))
            assert found.tolist() == [expected.note(int(each), its) for each, its in zip(rows, came, strict=True)]


def test_a_row_alone_is_noted_as_among_others() -> None:
    """One after the other in Python's integers, and together in arrays: the same table, with large ids, too."""
    draw = np.random.default_rng(3)
    alone, together = LookupHits(4), LookupHits(4)
    rows, num_hits = np.arange(4), 0
    for row in rows.tolist():
        prompt = draw.choice([1, 2, 3, 128_000, 2_000_000_000], 30).astype(np.int32)
        alone.start(Row(row), prompt, NOTHING)
        together.start(Row(row), prompt, NOTHING)
    for _ in range(300):
        tokens = draw.choice([1, 2, 3, 128_000, 2_000_000_000], 4).astype(np.int32)
        found = together.note(rows, tokens)
        assert [alone.note(rows[i : i + 1], tokens[i : i + 1]).item() for i in range(4)] == found.tolist()
        num_hits += np.count_nonzero(found)
    assert np.array_equal(alone._entries, together._entries)
    assert 100 < num_hits < 1_100


def result(step: int, tokens: list[int]) -> StepResult:
    return StepResult(step, np.arange(len(tokens), dtype=np.int32), np.array(tokens, np.int32))


def started(num_rows: int, max_drafts: int = 4, after_hits: bool = False) -> tuple[DraftGovernor, np.ndarray]:
    policy = SpeculationPolicy(max_drafts, hindsight=True, after_hits=after_hits)
    made = DraftGovernor(policy, CostTable(GPU), num_rows)
    for row in range(num_rows):
        made.start(Row(row), 0)
        made.read_text(Row(row), np.arange(1000, 1010, dtype=np.int32) + row, NOTHING)
    return made, made.candidates(0)


def planned(made: DraftGovernor, rows: np.ndarray, step: int) -> np.ndarray:
    return made.choose(step, rows, np.full(len(rows), 100), StepShape(len(rows), 400 * len(rows)), 512)


def test_on_a_cpu_rows_draft_behind_tokens_that_would_have_been_drafted() -> None:
    """A text of 40 tokens, then others, then the text again: drafts from its third token on, and none elsewhere."""
    made, rows = started(1, after_hits=True)
    made.note(np.zeros(1, np.int32), np.full(1, 4, np.int32), np.full(1, 4, np.int32))
    text = [*range(40), *range(100, 160), *range(40), *range(200, 240)]
    planned_at, told_at = [], []
    assert planned(made, rows, 0).tolist() == [4], "nothing is known of the first token"
    for step, token in enumerate(text, 1):
        before = made.quiet_until(step - 1)
        if made.note_tokens(result(step, [token]), NOTHING):
            told_at.append(step)
        else:
            assert before >= step - 1
        if planned(made, rows, step).any():
            planned_at.append(step)
        else:
            assert made.quiet_until(step) >= step, "steps may be steady until a token is one that would be drafted"
    assert told_at == list(range(103, 141)) == planned_at


def test_a_row_goes_on_drafting_behind_accepted_drafts() -> None:
    """Three tokens in a step, the last of which is a hit; then the last is none."""
    made, rows = started(1, after_hits=True)
    for step, token in enumerate(range(40), 1):
        made.note_tokens(result(step, [token]), NOTHING)
    drafting = np.zeros(1, np.int32)
    for tokens, may_draft in (([0, 1, 2], True), ([3, 4, 5], True), ([6, 7, 99], False), ([8, 9, 10], True)):
        step += 1
        passes = StepResult(step, np.zeros(3, np.int32), np.array(tokens, np.int32), passes=(1, 2))
        assert made.note_tokens(passes, drafting) == may_draft == bool(made._hit[0])
        assert planned(made, rows, step).any() == may_draft


def test_drafts_are_judged_by_the_tokens_behind_which_a_row_would_have_had_some() -> None:
    """One row repeats whole passages, between others that do not repeat; the other a token here and there."""
    made, rows = started(2, after_hits=True)
    step = 0
    for number in range(8):
        passage = [*range(12), *range(1_000 + 50 * number, 1_040 + 50 * number)]
        for place, token in enumerate(passage):
            step += 1
            other = 7 if place % 6 in (0, 1) else 8 if place % 12 == 2 else 5_000 + step  # 7 7 8, and 7 7 something
            made.note_tokens(result(step, [token, other]), NOTHING)
            planned(made, rows, step)
    chances = made._accepted / np.maximum(made._tried, 1e-9)
    assert chances[0] > 0.7 > 0.3 > chances[1]


def test_rows_begin_to_draft_when_their_text_begins_to_repeat() -> None:
    """Of 64 rows, half repeat what they wrote from the 48th token on, the others never: no try is needed."""
    made, rows = started(64)
    numbers = []
    for step in range(1, 80):
        counts = planned(made, rows, step)
        assert made.quiet_until(step) == step, "every token is judged"
        numbers.append((int(counts[:32].sum()), int(counts[32:].sum())))
        tokens = [row * 100 + (step % 48 if row < 32 else step) for row in range(64)]
        made.note_tokens(result(step, tokens), NOTHING)  # none was drafted: what would have been is judged
    assert all(first == second == 0 for first, second in numbers[20:48])
    assert all(first >= 32 for first, _ in numbers[60:])
    assert all(second == 0 for _, second in numbers[20:])


def test_a_row_that_never_repeats_stops_soon_whatever_others_did() -> None:
    made, rows = started(1)
    for step in range(200):  # what all rows together are expected to do
        made.note_tokens(result(step, [step % 10]), NOTHING)
    assert planned(made, rows, 200).tolist() == [4]
    made.start(Row(0), 200)
    made.read_text(Row(0), np.arange(5, dtype=np.int32), NOTHING)
    numbers = []
    for step in range(200, 400):
        numbers.append(int(planned(made, rows, step)[0]))
        made.note_tokens(result(step, [10_000 + step]), NOTHING)
    assert sum(number > 0 for number in numbers) < 24 and not any(numbers[24:])


def test_a_row_with_drafts_is_judged_by_them() -> None:
    made, rows = started(2)
    for step in range(40):
        made.note_tokens(result(step, [step % 4, step % 4]), np.array([1], np.int32))
        made.note(np.array([1], np.int32), np.array([4], np.int32), np.array([0], np.int32))
    assert planned(made, rows, 40).tolist() == [4, 0]


def test_the_tokens_of_all_passes_are_read() -> None:
    """A step with accepted drafts has several tokens of a row, in order."""
    made, rows = started(1)
    text = [7, 8, 9, 10, 11, 12]
    for step in range(0, 24, 3):
        tokens = np.array([text[(step + each) % 6] for each in range(3)], np.int32)
        several = StepResult(step, np.zeros(3, np.int32), tokens, passes=(1, 2))
        made.note_tokens(several, np.array([0], np.int32))
        made.note(np.array([0], np.int32), np.array([2], np.int32), np.array([0], np.int32))
    for step in range(24, 44):
        made.note_tokens(result(step, [text[step % 6]]), NOTHING)
    assert planned(made, rows, 44).tolist() == [4]
