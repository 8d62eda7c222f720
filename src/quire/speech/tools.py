"""Functions that a client offers, as plain values. Knows nothing of how a model is told of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Tool:
    """A function: its name, what it does, and the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, object] = field(default_factory=dict)
    strict: bool = False

    def as_declared(self) -> dict[str, object]:
        """As chat templates expect it, and as OpenAI's clients send it."""
        declared: dict[str, object] = {"name": self.name, "description": self.description}
        declared["parameters"] = dict(self.parameters) or {"type": "object", "properties": {}}
        return {"type": "function", "function": declared}
