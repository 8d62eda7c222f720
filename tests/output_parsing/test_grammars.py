"""Tool-call grammars, compiled by llguidance over the default model's tokens, accept exactly the valid calls."""

import json
import random
from dataclasses import dataclass

import llguidance
import llguidance.numpy
import numpy as np
import pytest

from quire.core.errors import InvalidParameter
from quire.core.sampling import Grammar, GrammarKind
from quire.grammar.lark_source import lark_source
from quire.output_parsing.events import ToolArguments, ToolStart
from quire.output_parsing.grammars import strict_grammar, tool_grammar
from quire.output_parsing.reasoning import THINK
from quire.output_parsing.template_messages import Tool
from quire.output_parsing.tool_formats import FORMATS, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, ToolFormat
from quire.text.tokenizer import Tokenizer
from tests.output_parsing.parsing import parse

CITY = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]}
WEATHER = Tool("get_weather", "The weather", CITY, strict=True)
NOW = Tool("now", parameters={"type": "object", "properties": {}})
TOOLS = (WEATHER, NOW)
SPECIAL = 3  # a special token of the default model, in place of another model's marker

OSLO = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CLOCK = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


@dataclass(frozen=True, slots=True)
class Acceptor:
    """Whether a grammar accepts a text as the whole output."""

    tokenizer: Tokenizer
    guidance: llguidance.LLTokenizer

    def matcher(self, grammar: Grammar) -> llguidance.LLMatcher:
        assert grammar.kind is GrammarKind.LARK
        matcher = llguidance.LLMatcher(self.guidance, lark_source(grammar).text)
        assert not matcher.is_error(), matcher.get_error()
        return matcher

    def allows(self, grammar: Grammar, *parts: str | int) -> bool:
        matcher = self.matcher(grammar)
        ids: list[int] = []
        for part in parts:
            ids += [part] if isinstance(part, int) else self.tokenizer.encode(part, add_special_tokens=False)
        return matcher.consume_tokens(ids) and matcher.is_accepting()

    def random_output(self, grammar: Grammar, seed: int, most_tokens: int) -> str | None:
        """Random tokens that the grammar allows; None if the end was not reached."""
        matcher, chance, ids = self.matcher(grammar), random.Random(seed), list[int]()
        mask = llguidance.numpy.allocate_token_bitmask(1, self.guidance.vocab_size)
        for _ in range(most_tokens):
            llguidance.numpy.fill_next_token_bitmask(matcher, mask)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            if self.guidance.eos_token in allowed:
                return self.tokenizer.decode(ids, skip_special_tokens=False)
            ids.append(chance.choice(allowed.tolist()))
            assert matcher.consume_token(ids[-1])
        return None


@pytest.fixture(scope="module")
def acceptor(default_tokenizer: Tokenizer, guidance_tokenizer: llguidance.LLTokenizer) -> Acceptor:
    return Acceptor(default_tokenizer, guidance_tokenizer)


def test_any_function_may_be_required(acceptor: Acceptor) -> None:
    grammar = tool_grammar(HERMES, TOOLS, None, parallel=True)
    assert acceptor.allows(grammar, OSLO)
    assert acceptor.allows(grammar, f"{OSLO}\n{CLOCK}")
    assert not acceptor.allows(grammar, "")
    assert not acceptor.allows(grammar, "Oslo is nice.")
    assert not acceptor.allows(grammar, f"Well. {OSLO}")
    assert not acceptor.allows(grammar, OSLO.replace("get_weather", "rm"))
    assert not acceptor.allows(grammar, OSLO.replace('"Oslo"', "3"))
    assert not acceptor.allows(grammar, OSLO.replace('"city": "Oslo"', ""))
    assert not acceptor.allows(grammar, OSLO.replace('"Oslo"', '"Oslo", "more": 1'))


def test_one_function_may_be_required_once(acceptor: Acceptor) -> None:
    grammar = tool_grammar(HERMES, TOOLS, "now", parallel=False)
    assert acceptor.allows(grammar, CLOCK)
    assert not acceptor.allows(grammar, OSLO)
    assert not acceptor.allows(grammar, f"{CLOCK}\n{CLOCK}")


def test_open_reasoning_precedes_a_forced_call(acceptor: Acceptor) -> None:
    grammar = tool_grammar(HERMES, TOOLS, None, parallel=False, open_reasoning=THINK)
    assert acceptor.allows(grammar, f"Which one?\n</think>{CLOCK}")
    assert not acceptor.allows(grammar, CLOCK)
    assert not acceptor.allows(grammar, "Which one?\n</think>None.")


def test_special_tokens_match_by_id(acceptor: Acceptor) -> None:
    ids = {"[TOOL_CALLS]": SPECIAL}
    grammar = tool_grammar(MISTRAL, TOOLS, None, parallel=True, special_tokens=ids)
    assert acceptor.allows(grammar, SPECIAL, ' [{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}]')
    assert not acceptor.allows(grammar, '[TOOL_CALLS] [{"name": "now", "arguments": {}}]')
    grammar = tool_grammar(MISTRAL_ARGS, TOOLS, None, parallel=True, special_tokens=ids)
    assert acceptor.allows(grammar, SPECIAL, "now[ARGS]{}", SPECIAL, 'get_weather[ARGS]{"city": "Oslo", "days": 2}')


def test_definitions_inside_a_schema_are_found(acceptor: Acceptor) -> None:
    schema = {"properties": {"to": {"$ref": "#/$defs/who"}}, "required": ["to"], "$defs": {"who": {"enum": ["é", "b"]}}}
    grammar = tool_grammar(LLAMA, [Tool("write", parameters=schema)], "write", parallel=False)
    assert acceptor.allows(grammar, '{"name": "write", "parameters": {"to": "é"}}')
    assert not acceptor.allows(grammar, '{"name": "write", "parameters": {"to": "c"}}')


@pytest.mark.parametrize("tool_format", FORMATS.values(), ids=lambda each: each.name)
@pytest.mark.parametrize("seed", range(4))
def test_random_output_of_a_forced_call_parses_as_a_call(
    acceptor: Acceptor, tool_format: ToolFormat, seed: int
) -> None:
    kinds = {"type": "object", "properties": {"kind": {"enum": ["a", "b c"]}, "sure": {"type": "boolean"}}}
    tool = Tool("classify", parameters={**kinds, "required": ["kind", "sure"]})
    output = acceptor.random_output(tool_grammar(tool_format, [tool, NOW], None, parallel=False), seed, most_tokens=200)
    assert output is not None
    start, arguments = parse(tool_format, [output])
    assert isinstance(start, ToolStart)
    assert isinstance(arguments, ToolArguments)
    right = [{"kind": kind, "sure": sure} for kind in ("a", "b c") for sure in (True, False)]
    assert json.loads(arguments.text) in (right if start.name == "classify" else [{}])


def test_tool_choice_must_name_an_offered_tool() -> None:
    with pytest.raises(InvalidParameter, match="asks for 'rm', but the tools are: get_weather, now") as caught:
        tool_grammar(HERMES, TOOLS, "rm", parallel=True)
    assert caught.value.param == "tool_choice"
    with pytest.raises(InvalidParameter, match="the tools are: none"):
        tool_grammar(HERMES, [], None, parallel=True)


def test_strict_tools_are_constrained_inside_free_text(acceptor: Acceptor) -> None:
    grammar = strict_grammar(HERMES, TOOLS, parallel=True)
    assert grammar is not None
    for text in ("", "Hello < there {", CLOCK, f"So:\n{OSLO}\n{CLOCK} Done.", f"{CLOCK} and {OSLO}"):
        assert acceptor.allows(grammar, text), text
    for text in (OSLO.replace('"Oslo"', "3"), f"{CLOCK}\nSo {OSLO.replace('city', 'town')}", "<tool_call> or not"):
        assert not acceptor.allows(grammar, text), text
    loose = CLOCK.replace("{}", '{"any": [1]}')
    assert acceptor.allows(grammar, loose), "a tool that is not strict takes any object"


def test_strict_text_holds_one_call_without_parallel_calls(acceptor: Acceptor) -> None:
    grammar = strict_grammar(HERMES, TOOLS, parallel=False)
    assert grammar is not None
    assert acceptor.allows(grammar, f"So {OSLO}")
    assert not acceptor.allows(grammar, f"{OSLO}\n{CLOCK}")


def test_a_special_token_triggers_the_strict_rules(acceptor: Acceptor) -> None:
    grammar = strict_grammar(MISTRAL, TOOLS, parallel=True, special_tokens={"[TOOL_CALLS]": SPECIAL})
    assert grammar is not None
    assert acceptor.allows(grammar, "Plain.")
    assert acceptor.allows(grammar, "Well. ", SPECIAL, ' [{"name": "get_weather", "arguments": {"city": "Oslo"}}]')
    assert not acceptor.allows(grammar, "Well. ", SPECIAL, ' [{"name": "get_weather", "arguments": {"city": 3}}]')


def test_without_strict_tools_or_an_opening_marker_text_is_free() -> None:
    assert strict_grammar(HERMES, [NOW], parallel=True) is None
    assert strict_grammar(LLAMA, TOOLS, parallel=True) is None
