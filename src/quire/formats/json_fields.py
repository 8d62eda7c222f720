"""Typed access to a mapping from a model file. Every error names the file, the key and the value.

A JSON null counts as absent, as it does in transformers. Does not depend on models.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TypeGuard

from quire.core.errors import BrokenModelFile, shown

MAX_INTEGER = 2**31 - 1


class JsonFields:
    """A mapping from a model file."""

    __slots__ = ("_prefix", "_values", "source")

    def __init__(self, values: Mapping[str, object], source: str, prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix  # of every key: GGUF names its keys after the architecture
        self.source = source

    def get(self, key: str) -> object:
        return self._values.get(self._prefix + key)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def mentions(self, key: str) -> bool:
        """Whether the key exists, also as null."""
        return self._prefix + key in self._values

    def integer(self, key: str, default: int | None = None, *, low: int = 1, high: int = MAX_INTEGER) -> int:
        value = self._value(key, default)
        whole = int(value) if isinstance(value, float) and value.is_integer() else value
        if isinstance(whole, bool) or not isinstance(whole, int) or not low <= whole <= high:
            raise self._wrong(key, value, f"a whole number from {low} to {high}")
        return whole

    def number(self, key: str, default: float | None = None, *, positive: bool = False) -> float:
        value = self._value(key, default)
        if not _is_number(value) or (positive and value <= 0):
            raise self._wrong(key, value, "a number above 0" if positive else "a number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "true or false")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        value = self._value(key, default)
        if not isinstance(value, str):
            raise self._wrong(key, value, "a string")
        return value

    def optional_integer(self, key: str, *, low: int = 0) -> int | None:
        return self.integer(key, low=low) if self.has(key) else None

    def optional_number(self, key: str) -> float | None:
        return self.number(key) if self.has(key) else None

    def numbers(self, key: str) -> tuple[float, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(_is_number(item) for item in value):
            raise self._wrong(key, value, "a list of numbers")
        return tuple(float(item) for item in value)

    def texts(self, key: str) -> tuple[str, ...]:
        value = self._value(key, None)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of strings")
        return tuple(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """One token id or a list of them; none if absent."""
        value = self.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for item in ids:
            if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item <= MAX_INTEGER:
                raise self._wrong(key, value, "a token id or a list of them")
        return tuple(ids)

    def mapping(self, key: str) -> "JsonFields":
        """A mapping inside this one; an empty one if absent."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            raise self._wrong(key, value, "a mapping")
        return JsonFields(value, f"{key} of {self.source}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __bool__(self) -> bool:
        return bool(self._values)

    def _value(self, key: str, default: int | float | str | None) -> object:
        value = self.get(key)
        if value is None:
            value = default
        if value is None:
            raise BrokenModelFile(f"{self.source} has no {self._prefix}{key}, which this model needs.")
        return value

    def _wrong(self, key: str, value: object, expected: str) -> BrokenModelFile:
        return BrokenModelFile(f"{self._prefix}{key} in {self.source} must be {expected}, not {shown(value)}.")


def _is_number(value: object) -> TypeGuard[int | float]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) if isinstance(value, float) else abs(value) <= 2**63
