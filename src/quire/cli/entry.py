"""The entry point of the console script. Its first statement makes Ctrl-C end the process at once: an interrupt while
modules are imported would show a traceback, or become another error. What comes before is Python's own start."""

import _signal  # type: ignore[import-not-found]  # built in: `signal` would first import enum, re's largest part
import os
import sys

TYPE_CHECKING = False  # as type checkers read it, without typing
if TYPE_CHECKING:
    from collections.abc import Callable

_INTERRUPTED = 130  # the status that shells expect after Ctrl-C


def _end_at_once(number: int, frame: object) -> None:
    os._exit(_INTERRUPTED)  # nothing is printed or started yet that would need an end


def main() -> None:
    """The console script. Subcommands handle Ctrl-C themselves once they are imported."""
    handled = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler  # not so in the background of a script
    if handled:
        _signal.signal(_signal.SIGINT, _end_at_once)
    try:
        try:
            work = _import_commands()
        finally:
            if handled:
                _signal.signal(_signal.SIGINT, _signal.default_int_handler)
        work()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None


def _import_commands() -> "Callable[[], None]":
    from quire import NOT_ON_WINDOWS

    if sys.platform == "win32":
        print(f"quire: {NOT_ON_WINDOWS}", file=sys.stderr)
        raise SystemExit(2)
    from quire.core.process import gc_frozen_imports

    with gc_frozen_imports():
        from quire.cli.main import main
    return main
