"""Log-probabilities of responses: those of the text's own tokens, whole and streamed, beside reasoning and calls."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseOutputMessage, ResponseOutputText

from quire.engine.outputs import Logprob
from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText, ToolArguments, ToolStart
from quire.server.chat.logprobs import TokenText
from quire.server.context import ServedModel
from quire.server.openai.responses_output import TextLogprobs
from tests.server.chat.test_tools import CLOCK, hermes
from tests.server.chat_server import MODEL, speaking
from tests.server.chat_templates import QWEN_3

ANSWER = "It think rains <b 🙂 你好."
LOGPROBS: Any = ["message.output_text.logprobs"]
LINES = [
    {"say": f"<think>\nIt think?\n</think>\n\n{ANSWER}\n{hermes('now', {})}", "when": "call please"},
    {"say": f"<think>\nIt think?\n</think>\n\n{ANSWER}", "when": "think please"},
    {"say": ANSWER},
]
TOOL: Any = {"type": "function", "name": CLOCK["function"]["name"], "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with speaking(tmp_path_factory.mktemp("logprobs"), LINES, QWEN_3) as (client, _):
        yield client


def part_of(response: Response) -> ResponseOutputText:
    [message] = [item for item in response.output if isinstance(item, ResponseOutputMessage)]
    [part] = message.content
    assert isinstance(part, ResponseOutputText)
    return part


def text_of(logprobs: Any) -> str:
    return b"".join(bytes(each.bytes if hasattr(each, "bytes") else each["bytes"]) for each in logprobs).decode()


@pytest.mark.parametrize("question", ["plain please", "think please", "call please"])
def test_each_token_of_the_text_has_one(client: openai.OpenAI, question: str) -> None:
    asked: Any = {"model": MODEL, "input": question, "include": LOGPROBS, "top_logprobs": 3, "tools": [TOOL]}
    response = client.responses.create(**asked)
    assert response.top_logprobs == 3
    part = part_of(response)
    assert part.text.strip() == ANSWER and part.logprobs
    assert text_of(part.logprobs).strip() == ANSWER
    assert all(len(each.top_logprobs) == 3 and each.logprob <= 0 for each in part.logprobs)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
        streamed = stream.get_final_response()
    assert part_of(streamed).logprobs == part.logprobs
    deltas = [each for event in events if event.type == "response.output_text.delta" for each in event.logprobs]
    assert [each.token for each in deltas] == [each.token for each in part.logprobs]
    [done] = [event for event in events if event.type == "response.output_text.done"]
    assert [each.token for each in done.logprobs] == [each.token for each in part.logprobs]


@pytest.mark.parametrize("question", ["plain please", "think please", "call please"])
@pytest.mark.parametrize("scored", [False, True])
def test_a_stream_of_all_kinds_of_items_is_replayed(client: openai.OpenAI, question: str, scored: bool) -> None:
    fields: Any = {"include": LOGPROBS, "top_logprobs": 3} if scored else {}
    events = list(client.responses.create(model=MODEL, input=question, tools=[TOOL], stream=True, **fields))
    last = events[-1]
    assert last.type == "response.completed"
    for after in (-1, len(events) // 2):
        skipped: Any = {} if after < 0 else {"starting_after": after}
        with client.responses.retrieve(last.response.id, stream=True, **skipped) as replayed:
            assert list(replayed) == events[after + 1 :]
    whole = client.responses.create(model=MODEL, input=question, tools=[TOOL], **fields)
    with client.responses.retrieve(whole.id, stream=True) as replayed:
        undivided = list(replayed)
    assert undivided[-1].type == "response.completed" and undivided[-1].response == whole


def test_they_are_given_if_asked_for(client: openai.OpenAI) -> None:
    assert part_of(client.responses.create(model=MODEL, input="hi")).logprobs == []
    alone = part_of(client.responses.create(model=MODEL, input="hi", include=LOGPROBS)).logprobs
    assert alone and all(each.top_logprobs == [] for each in alone) and text_of(alone) == ANSWER
    top = part_of(client.responses.create(model=MODEL, input="hi", top_logprobs=2)).logprobs
    assert top and all(len(each.top_logprobs) == 2 for each in top)


@pytest.mark.parametrize("at_once", [1, 2, 5, 100])
def test_tokens_are_found_however_they_come(model: ServedModel, at_once: int) -> None:
    """A parser that holds back what may become a tag; tags and calls contain words of the text."""
    tokenizer = model.text()
    pieces: list[tuple[str, OutputEvent | None]] = [
        ("<think>", None), ("th", ReasoningText("th")), ("</think>", None), ("th", PlainText("th")), ("at <", None),
        ("b", PlainText("at <b")), ("<call>", None), ('{"at <b": 1}', ToolStart(0, "f")), ("</call>", None),
        ("at <b", PlainText("at <b")),
    ]  # fmt: skip
    ids = [tokenizer.encode(text, add_special_tokens=False) for text, _ in pieces]
    token_text = TokenText(tokenizer, as_ids=False)
    logprobs = TextLogprobs(token_text, token_text.detokenizer(), 0)
    found: list[list[dict[str, object]]] = []
    for start in range(0, len(pieces), at_once):
        taken = range(start, min(start + at_once, len(pieces)))
        entries = [{token: Logprob(-1.0, 1, tokenizer.spell(token))} for at in taken for token in ids[at]]
        events = [event for at in taken if (event := pieces[at][1]) is not None]
        found += logprobs.add("".join(pieces[at][0] for at in taken), entries, [*events, ToolArguments(0, "")])
    assert [text_of(each) for each in found] == ["th", "at <b", "at <b"]
