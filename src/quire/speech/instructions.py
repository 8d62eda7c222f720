"""What a model is told of functions when its chat template has no words for them. Knows no template."""

import json
from collections.abc import Sequence

from quire.speech.tools import Tool


def tool_instructions(tools: Sequence[Tool]) -> str:
    """A part of the system message; the answer is read as `hermes.py` does."""
    declared = "\n".join(json.dumps(tool.as_declared(), ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. These are their JSON schemas, one a line:\n"
        f"<tools>\n{declared}\n</tools>\n"
        "To call a function, answer with a JSON object that has its name and its arguments, inside these tags:\n"
        '<tool_call>\n{"name": "the function", "arguments": {"an argument": "its value"}}\n</tool_call>\n'
        "Call a function only if it helps. You may call several, each in tags of its own."
    )
