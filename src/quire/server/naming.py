"""What a surface calls the fields of the chat or completion that it becomes: errors name what the client sent."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from quire.core.errors import QuireError

Names = Mapping[str, str]  # from the name inside to that of the surface


@contextmanager
def called(names: Names) -> Iterator[None]:
    """Errors that come out of here speak in these names."""
    try:
        yield
    except QuireError as error:
        if names:
            _rename(error, names)
        raise


def _rename(error: QuireError, names: Names) -> None:
    """A name that is a plain word too (stop, prompt) is meant as a name only where it comes first."""
    before = {name: r"(?<![\w.'\"])" if "_" in name else "^" for name in sorted(names, key=len, reverse=True)}
    pattern = re.compile("|".join(rf"{place}{re.escape(name)}(?!\w)" for name, place in before.items()))
    error.message = pattern.sub(lambda found: names[found[0]], error.message)
    if error.param is not None:
        error.param = pattern.sub(lambda found: names[found[0]], error.param)
