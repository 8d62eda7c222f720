"""A conversation put together from smaller pieces, in the shape of chat completions. Knows no API.

What the assistant says, thinks and calls in a row is one message; so are the instructions that come first.
"""

_INSTRUCTIONS = ("system", "developer")
_BETWEEN = {"assistant": "\n", "system": "\n\n", "developer": "\n\n"}  # the pieces of a text, by who says it


class MessageBuilder:
    """Told in order, from the beginning."""

    __slots__ = ("_call_names", "_messages")

    def __init__(self) -> None:
        self._messages: list[dict[str, object]] = []  # whose texts may still be in pieces
        self._call_names: dict[str, str] = {}

    def say(self, role: str, text: str) -> None:
        """Templates know one system message, at the beginning: all that are told there become one."""
        if role == "assistant":
            _add(self._assistant(), "content", text)
        elif role in _INSTRUCTIONS and len(self._messages) == 1 and self._messages[0]["role"] in _INSTRUCTIONS:
            self._messages[0]["role"] = "system"
            _pieces(self._messages[0], "content").append(text)
        else:
            self._messages.append({"role": role, "content": [text] if role in _BETWEEN else text})

    def think(self, text: str) -> None:
        _add(self._assistant(), "reasoning_content", text)

    def call(self, call_id: str, name: str, arguments: str) -> None:
        self._call_names[call_id] = name
        calls = self._assistant().setdefault("tool_calls", [])
        assert isinstance(calls, list)
        calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def result(self, call_id: str, text: str) -> None:
        """What a tool gave back. Some templates want its name again."""
        message: dict[str, object] = {"role": "tool", "tool_call_id": call_id, "content": text}
        if call_id in self._call_names:
            message["name"] = self._call_names[call_id]
        self._messages.append(message)

    def messages(self) -> list[dict[str, object]]:
        """All that was told. Texts are put together here, once: piece by piece, many would take the square of them."""
        return [_whole(message) for message in self._messages]

    @property
    def begun(self) -> bool:
        """Whether the last message is a text of the assistant, which could be gone on with."""
        last = self._messages[-1] if self._messages else {}
        return last.get("role") == "assistant" and bool(last.get("content")) and "tool_calls" not in last

    def _assistant(self) -> dict[str, object]:
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self._messages.append({"role": "assistant", "content": []})
        return self._messages[-1]


def _pieces(message: dict[str, object], name: str) -> list[str]:
    pieces = message.setdefault(name, [])
    assert isinstance(pieces, list)
    return pieces


def _add(message: dict[str, object], name: str, text: str) -> None:
    """Nothing, at the beginning, takes no line of its own."""
    pieces = _pieces(message, name)
    if pieces or text:
        pieces.append(text)


def _whole(message: dict[str, object]) -> dict[str, object]:
    between = _BETWEEN.get(str(message["role"]))
    if between is None:
        return message
    in_pieces = {name: message[name] for name in ("content", "reasoning_content") if name in message}
    return message | {name: between.join(pieces) for name, pieces in in_pieces.items() if isinstance(pieces, list)}
