"""Checks of single user-given values. Each raises `InvalidParameter`, which names the parameter.

Imports no numpy, which takes longer than all else that a command needs to refuse a wrong option.
"""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from quire.core.errors import InvalidParameter, shown

_PLAIN = (int, float, bool, str, list, tuple)


def plain(value: object) -> object:
    """A numpy number or array as a Python value: users mix both, encoders do not."""
    numpy = sys.modules.get("numpy")  # before it is imported, there is no value of it
    if numpy is not None and isinstance(value, numpy.generic | numpy.ndarray):
        return value.tolist()
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    return value


def convert_numpy(parameters: object, names: Iterable[str]) -> None:
    """Replace numpy values in these fields of a frozen dataclass by Python values."""
    for name in names:
        value = getattr(parameters, name)
        if not (value is None or type(value) in _PLAIN):
            object.__setattr__(parameters, name, plain(value))


def check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(f"{name} must be a whole number from {low} to {high}, not {shown(value)}.", param=name)


def check_float(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or (open_low and value == low):  # type: ignore[operator]  # NaN is nowhere
        bounds = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidParameter(f"{name} must be a number {bounds}, not {shown(value)}.", param=name)


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidParameter(f"{name} must be true or false, not {shown(value)}.", param=name)


def check_list(name: str, values: object, max_entries: int | None) -> None:
    """None, or a list of at most `max_entries` values. A string is not taken as a list of its letters."""
    if values is None:
        return
    if not isinstance(values, Sequence | Set) or isinstance(values, str | bytes | bytearray | memoryview):
        raise InvalidParameter(f"{name} must be a list, not {shown(values)}.", param=name)
    check_count(name, values, max_entries)


def check_strings(name: str, values: Iterable[object], max_characters: int) -> None:
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidParameter(f"{name} must hold non-empty strings, not {shown(value)}.", param=name)
        if len(value) > max_characters:
            raise InvalidParameter(
                f"{name} has a string of {len(value)} characters; the limit is {max_characters}.", param=name
            )


def check_count(name: str, values: Collection[object], max_entries: int | None) -> None:
    if max_entries is not None and len(values) > max_entries:
        raise InvalidParameter(f"{name} has {len(values)} entries; the limit is {max_entries}.", param=name)
