"""The pieces of an answer: in order, one at a time, nothing lost."""

from hypothesis import given
from hypothesis import strategies as st

from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText, ToolArguments, ToolStart
from quire.server.chat.items import ItemClosed, ItemDelta, ItemOpened, OutputItem, OutputItemKind, OutputItems


@st.composite
def speeches(draw: st.DrawFn) -> list[OutputEvent]:
    """As parsers tell them: arguments come after the start of their own call and before anything else."""
    events: list[OutputEvent] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from("tTc"), max_size=8)):
        pieces = draw(st.lists(st.text(max_size=3), max_size=3))
        if kind == "c":
            events.append(ToolStart(num_calls, f"tool{num_calls}"))
            events += [ToolArguments(num_calls, piece) for piece in pieces]
            num_calls += 1
        else:
            events += [PlainText(piece) if kind == "t" else ReasoningText(piece) for piece in pieces]
    return events


@given(speeches(), st.integers(1, 4), st.booleans())
def test_a_turn_tells_all_in_order_one_piece_at_a_time(events: list[OutputEvent], size: int, cut: bool) -> None:
    turn = OutputItems()
    steps = [step for start in range(0, len(events), size) for step in turn.hear(events[start : start + size])]
    steps += turn.end(cut=cut)
    opened: list[OutputItem] = []
    grown: dict[int, str] = {}
    is_open = False
    for step in steps:
        if isinstance(step, ItemOpened):
            assert not is_open and step.piece.place == len(opened)
            is_open = True
            opened.append(step.piece)
            grown[step.piece.place] = ""
        else:
            assert is_open and step.piece is opened[-1]
            if isinstance(step, ItemDelta):
                assert step.text
                grown[step.piece.place] += step.text
            is_open = not isinstance(step, ItemClosed)
    assert not is_open and opened == turn.pieces
    assert [piece.text for piece in opened] == list(grown.values())
    for kind, event_kind in (
        (OutputItemKind.TEXT, PlainText),
        (OutputItemKind.THOUGHT, ReasoningText),
        (OutputItemKind.CALL, ToolArguments),
    ):
        said = "".join(event.text for event in events if isinstance(event, event_kind))
        assert "".join(piece.text for piece in opened if piece.kind is kind) == said
    names = [event.name for event in events if isinstance(event, ToolStart)]
    assert [piece.name for piece in opened if piece.kind is OutputItemKind.CALL] == names
    assert [piece.cut for piece in opened] == [False] * (len(opened) - 1) + [cut]
    assert len({piece.key for piece in opened}) == len(opened)


def test_an_answer_without_a_word_is_an_empty_text() -> None:
    turn = OutputItems()
    opened, closed = turn.end(cut=False)
    assert isinstance(opened, ItemOpened) and isinstance(closed, ItemClosed)
    [piece] = turn.pieces
    assert (piece.kind, piece.text) == (OutputItemKind.TEXT, "")


def test_text_after_a_call_is_a_piece_of_its_own() -> None:
    turn = OutputItems()
    turn.hear(
        [
            PlainText("a"),
            ToolStart(0, "f"),
            ToolArguments(0, "{}"),
            PlainText("b"),
            ReasoningText("c"),
            ToolStart(1, "g"),
        ]
    )
    turn.end(cut=False)
    assert [(piece.kind.value, piece.name, piece.text) for piece in turn.pieces] == [
        ("text", "", "a"), ("call", "f", "{}"), ("text", "", "b"), ("thought", "", "c"), ("call", "g", ""),
    ]  # fmt: skip
