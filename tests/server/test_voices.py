"""What a model says besides text: thoughts and calls of tools, whole and streamed, through OpenAI's own client."""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import httpx
import openai
import pytest

from quire.core.grammar import Grammar
from quire.server.served import Served
from quire.server.voices import Tool, ToolChoice
from tests.server.scripted import Script, SemicolonVoice, app_over, bodies, post

ASK = [{"role": "user", "content": "What is the weather?"}]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLING = ("T:It ", "rains;T: perhaps;Let me see.;", "C:weather;", 'A:{"city":', ';A: "Rome"};', "C:clock;A:{};")


@pytest.fixture
def speaker(served: Served) -> Served:
    return replace(served, voice=SemicolonVoice())


def ask(script: Script, served: Served, **fields: object) -> dict[str, Any]:
    answer = post(app_over(script, served), "/v1/chat/completions", {"messages": ASK, **fields})
    assert answer.status_code == 200, answer.text
    assert script.num_left > 0
    return answer.json()  # type: ignore[no-any-return]


def test_a_whole_answer_tells_thoughts_text_and_calls(speaker: Served) -> None:
    answer = ask(Script(CALLING), speaker, tools=TOOLS)
    [choice] = answer["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert message["reasoning"] == message["reasoning_content"] == "It rains perhaps"
    functions = [call["function"] for call in message["tool_calls"]]
    assert functions == [{"name": "weather", "arguments": '{"city": "Rome"}'}, {"name": "clock", "arguments": "{}"}]
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2 and all(call_id.startswith("call_") for call_id in ids)
    assert answer["usage"]["completion_tokens_details"] == {"reasoning_tokens": 3}


def test_a_call_alone_has_no_content(speaker: Served) -> None:
    [choice] = ask(Script(["C:weather;A:{};"]), speaker, tools=TOOLS)["choices"]
    assert choice["message"]["content"] is None
    assert "reasoning" not in choice["message"]


def test_a_stream_says_the_same_piece_by_piece(speaker: Served) -> None:
    """As the client puts it together, and as its chunks lie on the wire."""

    async def tell() -> tuple[Any, list[Any]]:
        transport = httpx.ASGITransport(app_over(Script(CALLING), speaker))
        http = httpx.AsyncClient(transport=transport, base_url="http://here")
        async with openai.AsyncOpenAI(base_url="http://here/v1", api_key="none", http_client=http) as client:
            asked = {"model": "other", "messages": ASK, "tools": TOOLS, "stream_options": {"include_usage": True}}
            async with client.chat.completions.stream(**asked) as stream:  # type: ignore[arg-type]
                chunks = [event.chunk async for event in stream if event.type == "chunk"]
                return (await stream.get_final_completion()).choices[0], chunks

    choice, chunks = asyncio.run(tell())
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "Let me see.")
    arguments = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert arguments == [("weather", '{"city": "Rome"}'), ("clock", "{}")]
    *told, last = chunks
    thoughts = [chunk.choices[0].delta.model_extra or {} for chunk in told]
    assert "".join(thought.get("reasoning", "") for thought in thoughts) == "It rains perhaps"
    assert "".join(thought.get("reasoning_content", "") for thought in thoughts) == "It rains perhaps"
    assert last.usage.completion_tokens_details.reasoning_tokens == 3


def test_the_fragments_of_a_call(speaker: Served) -> None:
    answer = post(
        app_over(Script(CALLING), speaker), "/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "stream": True}
    )
    deltas = [body["choices"][0]["delta"] for body in bodies(answer.text)]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {}
    fragments = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    starts = [fragment for fragment in fragments if "id" in fragment]
    assert [(start["index"], start["type"], start["function"]) for start in starts] == [
        (0, "function", {"name": "weather", "arguments": ""}),
        (1, "function", {"name": "clock", "arguments": ""}),
    ]
    rest = [fragment for fragment in fragments if "id" not in fragment]
    assert [(each["index"], each["function"]["arguments"]) for each in rest] == [
        (0, '{"city":'), (0, ' "Rome"}'), (1, "{}"),
    ]  # fmt: skip
    assert all(set(each) == {"index", "function"} and set(each["function"]) == {"arguments"} for each in rest)


@pytest.mark.parametrize(
    ("reason", "pieces", "told"),
    [
        ("stop", ["hello"], "stop"),
        ("length", ["C:weather;A:{"], "length"),
        ("stop", ["C:weather;A:{};"], "tool_calls"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_it_ended(speaker: Served, reason: str, pieces: Sequence[str], told: str, stream: bool) -> None:
    app = app_over(Script(pieces, reason=reason), speaker)
    answer = post(app, "/v1/chat/completions", {"messages": ASK, "tools": TOOLS, "stream": stream})
    answers = bodies(answer.text) if stream else [answer.json()]
    assert [a["choices"][0]["finish_reason"] for a in answers if a["choices"][0]["finish_reason"]] == [told]


def test_thoughts_are_not_told_to_who_does_not_want_them(speaker: Served) -> None:
    for stream in (False, True):
        app = app_over(Script(CALLING), speaker)
        asked = {"messages": ASK, "include_reasoning": False, "stream": stream}
        assert "rains" not in post(app, "/v1/chat/completions", asked).text


def test_a_call_that_must_come_is_a_grammar_of_the_voice(speaker: Served) -> None:
    """The engine does not follow grammars yet: the refusal shows that the voice's own reached its door."""
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        script = Script(["x"])
        asked = {"messages": ASK, "tools": TOOLS, "tool_choice": choice}
        answer = post(app_over(script, speaker), "/v1/chat/completions", asked)
        assert answer.status_code == 400 and "(lark)" in answer.json()["error"]["message"]
        assert script.asked == []
        both = post(app_over(script, speaker), "/v1/chat/completions",
                    {**asked, "response_format": {"type": "json_object"}})  # fmt: skip
        assert "tool must be called" in both.json()["error"]["message"]


class Unforced(SemicolonVoice):
    """Calls by itself what it was told to call."""

    def tool_grammar(self, tools: Sequence[Tool], choice: ToolChoice, *, parallel: bool, prompt: str) -> Grammar:
        return cast(Grammar, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "told"), [("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")]
)
def test_a_call_of_a_named_tool_is_an_ordinary_end(served: Served, choice: object, told: str, stream: bool) -> None:
    app = app_over(Script(["C:weather;A:{};"]), replace(served, voice=Unforced()))
    asked = {"messages": ASK, "tools": TOOLS, "tool_choice": choice, "stream": stream}
    answer = post(app, "/v1/chat/completions", asked)
    last = bodies(answer.text)[-1] if stream else answer.json()
    assert last["choices"][0]["finish_reason"] == told


def test_tools_reach_the_template_unless_none_may_be_called(speaker: Served) -> None:
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{{ messages[0].content }}"
    served = replace(speaker, chat_template=template)
    prompts = []
    for choice in ("auto", "none"):
        script = Script(["x"])
        ask(script, served, tools=TOOLS, tool_choice=choice)
        prompts.append(served.spelled(script.asked[0][0]))
    assert prompts == ["weather What is the weather?", "What is the weather?"]


def test_a_turn_of_calls_and_results_goes_back_into_the_template(speaker: Served) -> None:
    """Arguments arrive as a text of JSON and are data to the template; older templates know no developer."""
    template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}:{{ m.reasoning_content }}:"
        "{{ m.tool_calls | default([]) | tojson }};{% endfor %}"
    )
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be"}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": None, "reasoning": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]
    script = Script(["x"])
    ask(script, replace(speaker, chat_template=template), messages=messages)
    told = speaker.spelled(script.asked[0][0])
    assert told.startswith("system:Be\nbrief.::")
    assert json.dumps({"city": "Rome"}) in told and "Hm." in told and "tool:rain" in told
