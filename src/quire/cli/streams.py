"""The standard streams of a command: there in any case, and what was printed has arrived before the command ends."""

import errno
import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def open_streams() -> None:
    """One that was closed (`>&-`) leads nowhere, lest a socket take its number and be written to. None refuses a
    character: a model may say what no terminal shows, and a prompt that is no text is refused by who reads it, who can
    say where."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):  # in the order of their descriptors
        if getattr(sys, name) is None:
            nowhere = open(os.devnull, mode)  # noqa: SIM115  # for as long as the process lives
            os.set_inheritable(nowhere.fileno(), True)
            setattr(sys, name, nowhere)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "replace"), (sys.stderr, "replace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)


@contextmanager
def arriving() -> Iterator[None]:
    """A disk that is full, or a reader who left, ends the block with a status, and a sentence if anybody minds."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _let_go()
        raise SystemExit(1) from None
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _let_go()
        where = "what this command prints" if error.filename is None else error.filename
        print(f"quire: Cannot write {where}: {error.strerror}. Make room, or write elsewhere.", file=sys.stderr)
        raise SystemExit(1) from None


def _let_go() -> None:
    """What could not be written would be tried once more when the interpreter ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
