"""Grammars of answers that have a form, and of what may stand beside them: a thought before, calls instead.

Like forced.py, knows nothing of how a grammar is compiled, nor of tokens.
"""

import json
from collections.abc import Mapping, Sequence

from quire.core.errors import InvalidParameter
from quire.core.grammar import Grammar, GrammarKind
from quire.speech.forced import calls_rules, lark, literal, thought_rules
from quire.speech.formats import ToolFormat
from quire.speech.reasoning import ReasoningTags
from quire.speech.tools import Tool


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
