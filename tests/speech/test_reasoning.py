"""Thoughts and answers are parted at the tags, and only at the beginning."""

import pytest

from quire.core.errors import ConfigError
from quire.speech.events import SpeechEvent, Text, Thought
from quire.speech.formats import HERMES
from quire.speech.reasoning import MISTRAL_THINK, THINK, tags_by_name
from tests.speech.hearing import calls, hear

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "forced", "events"),
    [
        ("<think>\nhm,\nso\n</think>\n\nYes.", False, [Thought("hm,\nso"), Text("Yes.")]),
        ("\n<think>hm</think>Yes.", False, [Thought("hm"), Text("Yes.")]),
        ("hm\n</think>\n\nYes.", True, [Thought("hm"), Text("Yes.")]),
        ("\n\nhm</think> Yes.", True, [Thought("hm"), Text(" Yes.")]),
        ("<think>\nhm</think>Yes.", True, [Thought("hm"), Text("Yes.")]),
        ("</think>Yes.", True, [Text("Yes.")]),
        ("<think>\n\n</think>\n\nYes.", False, [Text("Yes.")]),
        ("<think>it breaks off \n", False, [Thought("it breaks off \n")]),
        ("it breaks off", True, [Thought("it breaks off")]),
        ("Yes: <think>no</think>", False, [Text("Yes: <think>no</think>")]),
        ("<think>a</think>b<think>c</think>", False, [Thought("a"), Text("b<think>c</think>")]),
        ("  Yes.", False, [Text("  Yes.")]),
        (f"<think>I could {CALL}\n</think>\n\n{CALL}", False, [Thought(f"I could {CALL}"), *calls(("f", "{}"))]),
    ],
)
def test_thoughts_are_parted_from_the_answer(text: str, forced: bool, events: list[SpeechEvent]) -> None:
    assert hear(HERMES, [text], tags=THINK, forced_thought=forced) == events


def test_magistral_has_its_own_tags() -> None:
    events = hear(None, ["[THINK]hm[/THINK]Yes."], tags=MISTRAL_THINK)
    assert events == [Thought("hm"), Text("Yes.")]


def test_without_tags_all_is_answer() -> None:
    assert hear(None, ["<think>hm</think>"]) == [Text("<think>hm</think>")]


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
