"""Numbers in options: several whole ones with commas between them, and one within limits."""

import math
from collections.abc import Callable
from typing import Any

import click

_MANY = 20  # digits, which no limit has


class Within(click.FloatRange):
    """As click's own, which lets nan through: it lies on no side of any limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number that can be counted with.", param, ctx)
        return number


def counts(least: int, most: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """The callback of an option such as `16,64,256`, none outside its limits."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
        words = [word.strip().replace("_", "") for word in value.split(",")]
        if not all(word.isdecimal() and len(word) < _MANY and least <= int(word) <= most for word in words):
            raise click.BadParameter(
                f"{value!r} is no list of whole numbers from {least} to {most:,}, such as 16,64,256."
            )
        return tuple(map(int, words))

    return parse
