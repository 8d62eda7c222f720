"""Message builder: chat-completions messages from the items of other APIs. Does not depend on an API.

Consecutive text, reasoning and calls of the assistant form one message; so do leading system instructions.
"""

from collections.abc import Mapping

from quire.core.errors import InvalidPrompt, shown

_INSTRUCTION_ROLES = ("system", "developer")
_SEPARATORS = {"assistant": "\n", "system": "\n\n", "developer": "\n\n"}  # between the joined texts of a role


def refused_part(why: str, where: str) -> InvalidPrompt:
    """The refusal of an item or content block."""
    return InvalidPrompt(f"{why}.", param=where)


def text_field(part: Mapping[str, object], name: str, where: str) -> str:
    """A field of an item or content block that must be a text."""
    value = part.get(name)
    if not isinstance(value, str):
        raise refused_part(f"{where}.{name} must be a text, not {shown(value)}", where)
    return value


class MessageBuilder:
    """Collects the parts of a conversation in order."""

    __slots__ = ("_call_names", "_messages")

    def __init__(self) -> None:
        self._messages: list[dict[str, object]] = []  # texts of roles with a separator are lists until `messages`
        self._call_names: dict[str, str] = {}

    def add_text(self, role: str, text: str) -> None:
        """Templates accept one system message, the first: leading instructions are merged into it."""
        if role == "assistant":
            _append(self._assistant(), "content", text)
        elif (
            role in _INSTRUCTION_ROLES and len(self._messages) == 1 and self._messages[0]["role"] in _INSTRUCTION_ROLES
        ):
            self._messages[0]["role"] = "system"
            _texts(self._messages[0], "content").append(text)
        else:
            self._messages.append({"role": role, "content": [text] if role in _SEPARATORS else text})

    def add_reasoning(self, text: str) -> None:
        _append(self._assistant(), "reasoning_content", text)

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        self._call_names[call_id] = name
        calls = self._assistant().setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def add_result(self, call_id: str, text: str) -> None:
        """The result of a tool call. Some templates need the tool's name again."""
        message: dict[str, object] = {"role": "tool", "tool_call_id": call_id, "content": text}
        if call_id in self._call_names:
            message["name"] = self._call_names[call_id]
        self._messages.append(message)

    def messages(self) -> list[dict[str, object]]:
        """All messages. Texts are joined here, once: joining at each addition would be quadratic."""
        return [_joined(message) for message in self._messages]

    @property
    def ends_with_assistant_text(self) -> bool:
        """Whether the last message is text of the assistant, which can be continued."""
        last = self._messages[-1] if self._messages else {}
        return last.get("role") == "assistant" and bool(last.get("content")) and "tool_calls" not in last

    def _assistant(self) -> dict[str, object]:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": []})
        return self._messages[-1]


def _texts(message: dict[str, object], name: str) -> list[str]:
    texts = message.setdefault(name, [])
    assert isinstance(texts, list)
    return texts


def _append(message: dict[str, object], name: str, text: str) -> None:
    """Leading empty texts are dropped: they would add a line break."""
    texts = _texts(message, name)
    if texts or text:
        texts.append(text)


def _joined(message: dict[str, object]) -> dict[str, object]:
    separator = _SEPARATORS.get(str(message["role"]))
    if separator is None:
        return message
    fields = {name: message[name] for name in ("content", "reasoning_content") if name in message}
    return message | {name: separator.join(texts) for name, texts in fields.items() if isinstance(texts, list)}
