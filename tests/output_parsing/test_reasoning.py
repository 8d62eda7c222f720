"""Thoughts and answers are parted at the tags, and only at the beginning."""

import pytest

from quire.core.errors import ConfigError
from quire.output_parsing.events import PlainText, ReasoningText, SpeechEvent
from quire.output_parsing.reasoning import MISTRAL_THINK, THINK, tags_by_name
from quire.output_parsing.tool_formats import HERMES
from tests.output_parsing.parsing import calls, hear

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "forced", "events"),
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
def test_thoughts_are_parted_from_the_answer(text: str, forced: bool, events: list[SpeechEvent]) -> None:
    assert hear(HERMES, [text], tags=THINK, forced_thought=forced) == events


def test_magistral_has_its_own_tags() -> None:
    events = hear(None, ["[THINK]hm[/THINK]Yes."], tags=MISTRAL_THINK)
    assert events == [ReasoningText("hm"), PlainText("Yes.")]


def test_without_tags_all_is_answer() -> None:
    assert hear(None, ["<think>hm</think>"]) == [PlainText("<think>hm</think>")]


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [("<|assistant|><think>\n", True), ("<|assistant|>\n", False), ("<think>\n\n</think>\n\n", False)],
)
def test_a_prompt_may_open_the_thought(prompt: str, is_open: bool) -> None:
    assert THINK.is_open_after(prompt) is is_open


def test_tags_are_chosen_by_their_name() -> None:
    assert (tags_by_name("think"), tags_by_name("mistral")) == (THINK, MISTRAL_THINK)
    with pytest.raises(ConfigError, match="no reasoning tags 'thinks'; choose one of mistral, think"):
        tags_by_name("thinks")
