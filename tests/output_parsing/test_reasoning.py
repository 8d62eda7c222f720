"""Reasoning is split from the answer at the tags, at the start of the output only."""

import pytest

from quire.core.errors import ConfigError
from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText
from quire.output_parsing.reasoning import MISTRAL_THINK, THINK, tags_by_name
from quire.output_parsing.tool_formats import HERMES
from tests.output_parsing.parsing import calls, parse

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "starts_in_reasoning", "events"),
    [
        ("<think>\nhm,\nso\n</think>\n\nYes.", False, [ReasoningText("hm,\nso"), PlainText("Yes.")]),
        ("\n<think>hm</think>Yes.", False, [ReasoningText("hm"), PlainText("Yes.")]),
        ("hm\n</think>\n\nYes.", True, [ReasoningText("hm"), PlainText("Yes.")]),
        ("\n\nhm</think> Yes.", True, [ReasoningText("hm"), PlainText(" Yes.")]),
        ("<think>\nhm</think>Yes.", True, [ReasoningText("hm"), PlainText("Yes.")]),
        ("</think>Yes.", True, [PlainText("Yes.")]),
        ("<think>\n\n</think>\n\nYes.", False, [PlainText("Yes.")]),
        ("<think>it breaks off \n", False, [ReasoningText("it breaks off \n")]),
        ("it breaks off", True, [ReasoningText("it breaks off")]),
        ("Yes: <think>no</think>", False, [PlainText("Yes: <think>no</think>")]),
        ("<think>a</think>b<think>c</think>", False, [ReasoningText("a"), PlainText("b<think>c</think>")]),
        ("  Yes.", False, [PlainText("  Yes.")]),
        (f"<think>I could {CALL}\n</think>\n\n{CALL}", False, [ReasoningText(f"I could {CALL}"), *calls(("f", "{}"))]),
    ],
)
def test_reasoning_is_split_from_the_answer(text: str, starts_in_reasoning: bool, events: list[OutputEvent]) -> None:
    assert parse(HERMES, [text], tags=THINK, starts_in_reasoning=starts_in_reasoning) == events


def test_magistral_tags_are_recognised() -> None:
    events = parse(None, ["[THINK]hm[/THINK]Yes."], tags=MISTRAL_THINK)
    assert events == [ReasoningText("hm"), PlainText("Yes.")]


def test_without_tags_everything_is_the_answer() -> None:
    assert parse(None, ["<think>hm</think>"]) == [PlainText("<think>hm</think>")]


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("<|assistant|><think>\n", True), ("<|assistant|>\n", False), ("<think>\n\n</think>\n\n", False)],
)
def test_a_prompt_may_open_the_reasoning(prompt: str, is_open: bool) -> None:
    assert THINK.is_open_after(prompt) is is_open


def test_tags_are_found_by_name() -> None:
    assert (tags_by_name("think"), tags_by_name("mistral")) == (THINK, MISTRAL_THINK)
    with pytest.raises(ConfigError, match="no reasoning tags 'thinks'; choose one of mistral, think"):
        tags_by_name("thinks")
    for other in ("deepseek_r1", "deepseek-r1", "qwen3"):  # of vLLM and SGLang
        with pytest.raises(ConfigError, match=f"mistral, think. The tags of {other} are think here"):
            tags_by_name(other)
