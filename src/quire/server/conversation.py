"""A conversation put together from smaller pieces, in the shape of chat completions. Knows no API.

What the assistant says, thinks and calls in a row is one message; so are the instructions that come first.
"""

_INSTRUCTIONS = ("system", "developer")


class Conversation:
    """Told in order, from the beginning."""

    __slots__ = ("_call_names", "messages")

    def __init__(self) -> None:
        self.messages: list[dict[str, object]] = []
        self._call_names: dict[str, str] = {}

    def say(self, role: str, text: str) -> None:
        """Templates know one system message, at the beginning: all that are told there become one."""
        if role == "assistant":
            self._add_text(self._assistant(), text)
        elif role in _INSTRUCTIONS and len(self.messages) == 1 and self.messages[0]["role"] in _INSTRUCTIONS:
            self.messages[0].update(role="system", content=f"{self.messages[0]['content']}\n\n{text}")
        else:
            self.messages.append({"role": role, "content": text})

    def think(self, text: str) -> None:
        message = self._assistant()
        before = message.get("reasoning_content")
        message["reasoning_content"] = f"{before}\n{text}" if before else text

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
        self.messages.append(message)

    @property
    def begun(self) -> bool:
        """Whether the last message is a text of the assistant, which could be gone on with."""
        last = self.messages[-1] if self.messages else {}
        return last.get("role") == "assistant" and bool(last.get("content")) and "tool_calls" not in last

    def _assistant(self) -> dict[str, object]:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        return self.messages[-1]

    @staticmethod
    def _add_text(message: dict[str, object], text: str) -> None:
        before = message["content"]
        message["content"] = f"{before}\n{text}" if before else text
