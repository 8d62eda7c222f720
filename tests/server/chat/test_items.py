"""Output items: in order, one open at a time, no event lost."""

from hypothesis import given
from hypothesis import strategies as st

from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText, ToolArguments, ToolStart
from quire.server.chat.items import ItemClosed, ItemDelta, ItemOpened, OutputItem, OutputItemKind, OutputItems


@st.composite
def output_events(draw: st.DrawFn) -> list[OutputEvent]:
    """Events in the order of parsers: arguments directly follow the start of their call."""
    events: list[OutputEvent] = []
    num_calls = 0
    for kind in draw(st.lists(st.sampled_from("tTc"), max_size=8)):
        texts = draw(st.lists(st.text(max_size=3), max_size=3))
        if kind == "c":
            events.append(ToolStart(num_calls, f"tool{num_calls}"))
            events += [ToolArguments(num_calls, text) for text in texts]
            num_calls += 1
        else:
            events += [PlainText(text) if kind == "t" else ReasoningText(text) for text in texts]
    return events


@given(output_events(), st.integers(1, 4), st.booleans())
def test_items_hold_all_events_in_order_one_open_at_a_time(
    events: list[OutputEvent], size: int, truncated: bool
) -> None:
    items = OutputItems()
    item_events = [each for start in range(0, len(events), size) for each in items.add(events[start : start + size])]
    item_events += items.finish(truncated=truncated)
    opened: list[OutputItem] = []
    texts: dict[int, str] = {}
    is_open = False
    for item_event in item_events:
        if isinstance(item_event, ItemOpened):
            assert not is_open and item_event.item.index == len(opened)
            is_open = True
            opened.append(item_event.item)
            texts[item_event.item.index] = ""
        else:
            assert is_open and item_event.item is opened[-1]
            if isinstance(item_event, ItemDelta):
                assert item_event.text
                texts[item_event.item.index] += item_event.text
            is_open = not isinstance(item_event, ItemClosed)
    assert not is_open and opened == items.items
    assert [item.text for item in opened] == list(texts.values())
    for kind, event_kind in (
        (OutputItemKind.TEXT, PlainText),
        (OutputItemKind.REASONING, ReasoningText),
        (OutputItemKind.TOOL_CALL, ToolArguments),
    ):
        text = "".join(event.text for event in events if isinstance(event, event_kind))
        assert "".join(item.text for item in opened if item.kind is kind) == text
    names = [event.name for event in events if isinstance(event, ToolStart)]
    assert [item.name for item in opened if item.kind is OutputItemKind.TOOL_CALL] == names
    assert [item.truncated for item in opened] == [False] * (len(opened) - 1) + [truncated]
    assert len({item.key for item in opened}) == len(opened)


def test_empty_output_is_one_empty_text_item() -> None:
    items = OutputItems()
    opened, closed = items.finish(truncated=False)
    assert isinstance(opened, ItemOpened) and isinstance(closed, ItemClosed)
    [item] = items.items
    assert (item.kind, item.text) == (OutputItemKind.TEXT, "")


def test_text_after_a_call_is_a_new_item() -> None:
    items = OutputItems()
    items.add(
        [
            PlainText("a"),
            ToolStart(0, "f"),
            ToolArguments(0, "{}"),
            PlainText("b"),
            ReasoningText("c"),
            ToolStart(1, "g"),
        ]
    )
    items.finish(truncated=False)
    assert [(item.kind.value, item.name, item.text) for item in items.items] == [
        ("text", "", "a"), ("tool_call", "f", "{}"), ("text", "", "b"), ("reasoning", "", "c"), ("tool_call", "g", ""),
    ]  # fmt: skip
