"""Several whole numbers in one option, with commas between them."""

from collections.abc import Callable

import click


def counts(least: int) -> Callable[[click.Context, click.Parameter, str], tuple[int, ...]]:
    """The callback of an option such as `16,64,256`, none below a least one."""

    def parse(ctx: click.Context, param: click.Parameter, value: str) -> tuple[int, ...]:
        words = [word.strip().replace("_", "") for word in value.split(",")]
        if not all(word.isdecimal() and int(word) >= least for word in words):
            raise click.BadParameter(f"{value!r} is no list of whole numbers from {least} on, such as 16,64,256.")
        return tuple(map(int, words))

    return parse
