"""Grammars of tool calls and structured output: Lark in llguidance's dialect, around JSON schemas.

A forced call consists of calls only. Structured output may have reasoning before it and tool calls in its place. Does
not depend on compilation or the vocabulary: the caller passes the ids of special tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence

from quire.core.closed_schema import close_objects
from quire.core.errors import InvalidParameter, shown
from quire.core.sampling import Grammar, GrammarKind
from quire.output_parsing.reasoning import ReasoningTags
from quire.output_parsing.template_messages import Tool
from quire.output_parsing.tool_formats import CallDelimiters, ToolFormat


def tool_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    choice: str | None,
    parallel: bool,
    *,
    special_tokens: Mapping[str, int] | None = None,
    open_reasoning: ReasoningTags | None = None,
) -> Grammar:
    """Calls and nothing else: of the function named by `choice`, of any if it is None; several only if `parallel`.

    `special_tokens`: ids of the format's markers that are special tokens; a grammar matches such tokens by id only.
    `open_reasoning`: the tags if the prompt ends inside reasoning, whose rest then comes first.
    """
    allowed = [tool for tool in tools if choice is None or tool.name == choice]
    if not allowed:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidParameter(
            f"tool_choice asks for {shown(choice or 'any function')}, but the tools are: {known}.", param="tool_choice"
        )
    ids = special_tokens or {}
    calls = tool_call_rules(tool_format, allowed, parallel, ids)
    if open_reasoning is None:
        return lark(["start: calls", *calls])
    return lark(["start: reasoning calls", *reasoning_rules(open_reasoning, ids), *calls])


def strict_grammar(
    tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, *, special_tokens: Mapping[str, int] | None = None
) -> Grammar | None:
    """Free text in which calls, once opened, are constrained: arguments of strict tools follow their schemas.

    None if no tool is strict, or if the format's calls have no opening marker that could trigger the constraint.
    """
    ids = special_tokens or {}
    delimiters = tool_format.delimiters
    marker = next((marker for marker in tool_format.markers if delimiters.opening.startswith(marker)), None)
    if marker is None or not any(tool.strict for tool in tools):
        return None
    trigger = f"TEXT {literal(marker, ids)}" if marker in ids else "trigger"
    rest = _calls_body(delimiters, parallel, ids, already=marker)
    rules = ["start: triggered* TEXT" if parallel else "start: TEXT | triggered", f"triggered: {trigger} {rest}"]
    if marker not in ids:
        rules.append(f"trigger[lazy]: TEXT {literal(marker, ids)}")
    rules.append(r"TEXT: /(.|\n)*/")
    loose = [tool if tool.strict else Tool(tool.name) for tool in tools]
    return lark([*rules, *_call_rules(delimiters, loose, ids)])


def tool_call_rules(
    tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, ids: Mapping[str, int]
) -> list[str]:
    """The rule `calls`: one call of these tools, or several, between the format's delimiters."""
    delimiters = tool_format.delimiters
    return [f"calls: {_calls_body(delimiters, parallel, ids)}", *_call_rules(delimiters, tools, ids)]


def reasoning_rules(tags: ReasoningTags, ids: Mapping[str, int]) -> list[str]:
    """The rule `reasoning`: the rest of open reasoning, its end tag, and the line breaks after it."""
    end = literal(tags.end, ids)
    if tags.end in ids:
        rules = [f"reasoning: REASONING {end} BREAKS?"]
    else:
        rules = ["reasoning: to_end_tag BREAKS?", f"to_end_tag[lazy]: REASONING {end}"]
    return [*rules, r"REASONING: /(.|\n)*/", r"BREAKS: /\n{1,2}/"]


def _calls_body(delimiters: CallDelimiters, parallel: bool, ids: Mapping[str, int], already: str = "") -> str:
    """One call or several between their delimiters, without the part of the opening that is `already` written."""
    more = f"({literal(delimiters.between, ids)} call)*" if parallel else ""
    opening = delimiters.opening.removeprefix(already)
    return _join(literal(opening, ids), "call", more, literal(delimiters.closing, ids))


def _call_rules(delimiters: CallDelimiters, tools: Sequence[Tool], ids: Mapping[str, int]) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
    for index, tool in enumerate(tools):
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        before = literal(delimiters.before_name + name + delimiters.before_arguments, ids)
        schema = f"%json {json.dumps(arguments_schema(tool))}"
        rules.append(f"call_{index}: {_join(before, schema, literal(delimiters.after_arguments, ids))}")
    return rules


def arguments_schema(tool: Tool) -> dict[str, object]:
    """Arguments are an object. Listed properties exclude others, unless the schema allows them or needs them."""
    return close_objects({"type": "object", **tool.parameters})


def literal(text: str, ids: Mapping[str, int]) -> str:
    """The text as a Lark literal, special tokens by id; empty for empty text."""
    if not text:
        return ""
    if not ids:
        return json.dumps(text)
    parts = re.split("(" + "|".join(re.escape(marker) for marker in ids) + ")", text)
    return _join(*(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part))


def _join(*symbols: str) -> str:
    return " ".join(symbol for symbol in symbols if symbol)


def lark(rules: Sequence[str]) -> Grammar:
    """Rules as one grammar."""
    return Grammar(GrammarKind.LARK, "\n".join(("%llguidance {}", *rules, "")))


def response_grammar(
    answer: Grammar,
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    parallel: bool,
    *,
    special_tokens: Mapping[str, int],
    tags: ReasoningTags | None,
    prompt: str,
) -> Grammar:
    """The grammar of a whole output after `prompt` whose answer follows `answer`.

    A reasoning model may reason first, unless the prompt closes its reasoning; a model with tools may call them
    instead. A regular expression or Lark grammar cannot be combined with others: the output is the answer alone.
    """
    is_open = tags is not None and tags.is_open_after(prompt)
    may_reason = tags is not None and not is_open and not tags.is_closed_after(prompt)
    rule = _answer_rule(answer)
    if rule is None:
        if is_open:
            raise InvalidParameter(
                f"The prompt ends inside reasoning, and a {answer.kind.value} cannot follow reasoning; use "
                f'reasoning_effort: "none", or JSON or a choice.',
                param="structured_outputs",
            )
        return answer
    if not tools and not is_open and not may_reason:
        return answer
    rules = [f"output: answer{' | calls' if tools else ''}", f"answer: {rule}"]
    if tools:
        rules += tool_call_rules(tool_format, tools, parallel, special_tokens)
    if tags is not None and is_open:
        rules = ["start: reasoning output", *reasoning_rules(tags, special_tokens), *rules]
    elif tags is not None and may_reason:
        opening = literal(tags.start, special_tokens)
        rules = [f"start: output | {opening} reasoning output", *reasoning_rules(tags, special_tokens), *rules]
    else:
        rules = ["start: output", *rules]
    return lark(rules)


def _answer_rule(answer: Grammar) -> str | None:
    """The answer as one alternative of a rule; None if it can only be a whole grammar."""
    match answer.kind:
        case GrammarKind.JSON_OBJECT:
            return '%json {"type": "object"}'
        case GrammarKind.JSON_SCHEMA if answer.text.startswith("{"):
            return f"%json {answer.text}"
        case GrammarKind.CHOICE:
            return "(" + " | ".join(json.dumps(choice) for choice in json.loads(answer.text)) + ")"
    return None
