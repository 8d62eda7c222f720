"""Where the command begins. Imports nothing at first: who presses Ctrl-C early sees no traceback."""

_INTERRUPTED = 130  # what shells expect after Ctrl-C


def main() -> None:
    """The console script. Once its verbs are here, they have their own ways with Ctrl-C."""
    try:
        from quire.cli.main import main as work

        work()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
