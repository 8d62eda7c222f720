"""A sign of life on a terminal while the heavy libraries are imported."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext


@contextmanager
def waking() -> Iterator[None]:
    from quire.cli.console import err

    with err.status("waking up") if err.is_terminal else nullcontext():
        yield
