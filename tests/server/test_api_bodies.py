"""Random bodies of Responses, Messages, TGI and Ollama: each becomes a chat or is refused, never another error."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import QuireError
from quire.server.anthropic import messages as messages_request
from quire.server.anthropic.messages import MessagesBody
from quire.server.chat.prompt import chat_prompt
from quire.server.context import ServedModel
from quire.server.ollama import generate as ollama_request
from quire.server.ollama.generate import OllamaChatBody
from quire.server.openai import responses_input as responses_request
from quire.server.openai.responses_input import ResponsesBody
from quire.server.request.decode import decode
from quire.server.tgi import generate as tgi_request
from quire.server.tgi.generate import GenerateBody

KINDS = ("message", "function_call", "function_call_output", "reasoning", "text", "input_text", "tool_use",
         "tool_result", "thinking", "function", "allowed_tools", "json", "json_schema")  # fmt: skip
WORDS = st.sampled_from((*KINDS, "user", "assistant", "system", "auto", "any", "tool", "f"))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)


def objects(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=dict.fromkeys(names, JSON))


ITEMS = objects("type", "role", "content", "call_id", "name", "arguments", "output", "summary")
BLOCKS = objects("type", "text", "id", "name", "input", "tool_use_id", "content", "thinking")
CHOICES = WORDS | objects("type", "name", "mode", "tools")


@given(
    st.fixed_dictionaries(
        {"input": st.lists(ITEMS, max_size=4)},
        optional={
            "tools": st.lists(objects("type", "name", "parameters", "strict"), max_size=3),
            "tool_choice": CHOICES,
            "text": objects("format", "verbosity"),
            "instructions": WORDS,
        },
    )
)
def test_responses(body: dict[str, Any]) -> None:
    try:
        chat = responses_request.as_chat(decode(json.dumps(body).encode(), ResponsesBody), (), lambda _: None)
        chat_prompt(chat)
    except QuireError as error:
        assert error.status == 400
        return
    assert all(isinstance(message["content"], str) for message in chat.messages)


@given(
    st.fixed_dictionaries(
        {"max_tokens": st.integers(0, 9), "messages": st.lists(
            st.fixed_dictionaries({"role": WORDS, "content": WORDS | st.lists(BLOCKS, max_size=3)}), max_size=3
        )},
        optional={
            "system": WORDS | st.lists(BLOCKS, max_size=2),
            "tools": st.lists(objects("type", "name", "input_schema"), max_size=3),
            "tool_choice": objects("type", "name", "disable_parallel_tool_use"),
            "thinking": objects("type"),
            "output_config": objects("effort", "format"),
        },
    )
)  # fmt: skip
def test_messages(body: dict[str, Any]) -> None:
    try:
        chat = messages_request.as_chat(decode(json.dumps(body).encode(), MessagesBody))
        chat_prompt(chat)
    except QuireError as error:
        assert error.status == 400
        return
    assert all(isinstance(message["content"], str) for message in chat.messages)


@given(st.fixed_dictionaries({"inputs": WORDS}, optional={"parameters": objects("grammar", "stop", "top_k", "seed")}))
def test_tgi(body: dict[str, Any]) -> None:
    try:
        completion = tgi_request.as_completion(decode(json.dumps(body).encode(), GenerateBody), stream=False)
    except QuireError as error:
        assert error.status == 400
        return
    assert completion.prompt == body["inputs"]


MESSAGES = objects("role", "content", "thinking", "images", "tool_calls", "tool_name", "tool_call_id")


@given(
    st.fixed_dictionaries(
        {"messages": st.lists(MESSAGES | st.fixed_dictionaries({"role": WORDS, "content": WORDS}), max_size=4)},
        optional={
            "tools": st.lists(objects("type", "function"), max_size=3),
            "options": objects("stop", "top_k", "seed", "num_predict", "num_ctx", "mirostat", "repeat_last_n"),
            "format": JSON,
            "think": JSON,
        },
    )
)
def test_ollama(model: ServedModel, body: dict[str, Any]) -> None:
    try:
        chat = ollama_request.as_chat(decode(json.dumps(body).encode(), OllamaChatBody), model)
        chat_prompt(chat)
    except QuireError as error:
        assert error.status == 400
        return
    assert all(isinstance(message["content"], str) for message in chat.messages)


def test_consecutive_text_reasoning_and_calls_are_one_message() -> None:
    body = {
        "input": [
            {"role": "user", "content": "a"},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c"}]},
            {"type": "function_call", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "d"}]},
        ]
    }
    user, assistant, tool = responses_request.as_chat(
        decode(json.dumps(body).encode(), ResponsesBody), (), lambda _: None
    ).messages
    assert (user["content"], assistant["content"], assistant["reasoning_content"]) == ("a", "c", "b")
    assert [call["function"]["name"] for call in assistant["tool_calls"]] == ["f", "g"]
    assert tool == {"role": "tool", "tool_call_id": "call_2", "content": "d", "name": "g"}
