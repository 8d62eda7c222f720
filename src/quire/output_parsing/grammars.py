"""Grammars that make a model call: Lark in llguidance's dialect, around the JSON schemas of the arguments.

Knows nothing of how a grammar is compiled, nor of tokens: special tokens are named by whoever knows their ids.

Grammars of answers that have a form, and of what may stand beside them: a thought before, calls instead.

Like forced.py, knows nothing of how a grammar is compiled, nor of tokens.
"""

import json
import re
from collections.abc import Mapping, Sequence

from quire.core.errors import InvalidParameter, shown
from quire.core.sampling import Grammar, GrammarKind
from quire.output_parsing.reasoning import ReasoningTags
from quire.output_parsing.template_messages import Tool
from quire.output_parsing.tool_formats import CallDelimiters, ToolFormat

_COMPOSED = frozenset({"allOf", "anyOf", "oneOf", "not", "if", "$ref", "dependentSchemas", "patternProperties"})


def tool_grammar(
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    choice: str | None,
    parallel: bool,
    *,
    special_tokens: Mapping[str, int] | None = None,
    open_thought: ReasoningTags | None = None,
) -> Grammar:
    """Calls and nothing else: of the function named by `choice`, or of any if it is None; several only if `parallel`.

    `special_tokens` has the ids of those markers of the format that are special tokens of the model: a grammar matches
    such tokens by id only. `open_thought` has the tags of a thought inside which the prompt ends: it comes first.
    """
    chosen = [tool for tool in tools if choice is None or tool.name == choice]
    if not chosen:
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InvalidParameter(
            f"tool_choice asks for {shown(choice or 'any function')}, but the tools are: {known}.", param="tool_choice"
        )
    ids = special_tokens or {}
    calls = calls_rules(tool_format, chosen, parallel, ids)
    if open_thought is None:
        return lark(["start: calls", *calls])
    return lark(["start: thought calls", *thought_rules(open_thought, ids), *calls])


def strict_grammar(
    tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, *, special_tokens: Mapping[str, int] | None = None
) -> Grammar | None:
    """Free text in which a call, once it is opened, must be right: arguments of strict tools keep to their schemas.

    None if no tool is strict, or if the format's calls have no opening mark that could set the rules in force.
    """
    ids = special_tokens or {}
    brackets = tool_format.brackets
    mark = next((mark for mark in tool_format.markers if brackets.opening.startswith(mark)), None)
    if mark is None or not any(tool.strict for tool in tools):
        return None
    trigger = f"TEXT {literal(mark, ids)}" if mark in ids else "trigger"
    rest = _calls(brackets, parallel, ids, already=mark)
    rules = ["start: marked* TEXT" if parallel else "start: TEXT | marked", f"marked: {trigger} {rest}"]
    if mark not in ids:
        rules.append(f"trigger[lazy]: TEXT {literal(mark, ids)}")
    rules.append(r"TEXT: /(.|\n)*/")
    loose = [tool if tool.strict else Tool(tool.name) for tool in tools]
    return lark([*rules, *_call_rules(brackets, loose, ids)])


def calls_rules(tool_format: ToolFormat, tools: Sequence[Tool], parallel: bool, ids: Mapping[str, int]) -> list[str]:
    """The rule `calls`: one call of these tools, or several, in the format's brackets."""
    brackets = tool_format.brackets
    return [f"calls: {_calls(brackets, parallel, ids)}", *_call_rules(brackets, tools, ids)]


def thought_rules(tags: ReasoningTags, ids: Mapping[str, int]) -> list[str]:
    """The rule `thought`: the rest of a thought that has begun, its end, and the line breaks after it."""
    end = literal(tags.end, ids)
    if tags.end in ids:
        rules = [f"thought: THOUGHT {end} BREAKS?"]
    else:
        rules = ["thought: thinking BREAKS?", f"thinking[lazy]: THOUGHT {end}"]
    return [*rules, r"THOUGHT: /(.|\n)*/", r"BREAKS: /\n{1,2}/"]


def _calls(brackets: CallDelimiters, parallel: bool, ids: Mapping[str, int], already: str = "") -> str:
    """One call or several in their brackets, after that part of them which is already there."""
    more = f"({literal(brackets.between, ids)} call)*" if parallel else ""
    opening = brackets.opening.removeprefix(already)
    return _words(literal(opening, ids), "call", more, literal(brackets.closing, ids))


def _call_rules(brackets: CallDelimiters, tools: Sequence[Tool], ids: Mapping[str, int]) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
    for place, tool in enumerate(tools):
        name = json.dumps(tool.name, ensure_ascii=False)[1:-1]
        before = literal(brackets.before_name + name + brackets.before_arguments, ids)
        schema = f"%json {json.dumps(_arguments_schema(tool))}"
        rules.append(f"call_{place}: {_words(before, schema, literal(brackets.after_arguments, ids))}")
    return rules


def _arguments_schema(tool: Tool) -> dict[str, object]:
    """Arguments are an object. One that lists its properties has no others, unless it says so or is put together."""
    schema: dict[str, object] = {"type": "object", **tool.parameters}
    if "properties" in schema and not _COMPOSED & schema.keys():
        schema.setdefault("additionalProperties", False)
    return schema


def literal(text: str, ids: Mapping[str, int]) -> str:
    """A text as the grammar writes it, special tokens by their ids; empty for none."""
    if not text:
        return ""
    if not ids:
        return json.dumps(text)
    parts = re.split("(" + "|".join(re.escape(marker) for marker in ids) + ")", text)
    return _words(*(f"<[{ids[part]}]>" if part in ids else json.dumps(part) for part in parts if part))


def _words(*words: str) -> str:
    return " ".join(word for word in words if word)


def lark(rules: Sequence[str]) -> Grammar:
    """Rules as one grammar."""
    return Grammar(GrammarKind.LARK, "\n".join(("%llguidance {}", *rules, "")))


def shaped_answer(
    answer: Grammar,
    tool_format: ToolFormat,
    tools: Sequence[Tool],
    parallel: bool,
    *,
    special_tokens: Mapping[str, int],
    tags: ReasoningTags | None,
    prompt: str,
) -> Grammar:
    """What a continuation of `prompt` may say if its answer must follow `answer`.

    A model that thinks may think first, unless the prompt says that it has; and one that has tools may call them
    instead. A regular expression or a grammar cannot be put beside others, so there the answer comes alone.
    """
    is_open = tags is not None and tags.is_open_after(prompt)
    may_think = tags is not None and not is_open and not tags.is_closed_after(prompt)
    rule = _answer_rule(answer)
    if rule is None:
        if is_open:
            raise InvalidParameter(
                f"The model thinks first here, and a {answer.kind.value} cannot begin after a thought; ask with "
                f'reasoning_effort: "none", or for JSON or a choice.',
                param="structured_outputs",
            )
        return answer
    if not tools and not is_open and not may_think:
        return answer
    rules = [f"said: answer{' | calls' if tools else ''}", f"answer: {rule}"]
    if tools:
        rules += calls_rules(tool_format, tools, parallel, special_tokens)
    if tags is not None and is_open:
        rules = ["start: thought said", *thought_rules(tags, special_tokens), *rules]
    elif tags is not None and may_think:
        opened = literal(tags.start, special_tokens)
        rules = [f"start: said | {opened} thought said", *thought_rules(tags, special_tokens), *rules]
    else:
        rules = ["start: said", *rules]
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
