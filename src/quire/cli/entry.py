"""The entry point of the console script. Imports nothing before its try block: an early Ctrl-C shows no traceback."""

_INTERRUPTED = 130  # the status that shells expect after Ctrl-C


def main() -> None:
    """The console script. Subcommands handle Ctrl-C themselves once they are imported."""
    try:
        import sys

        from quire import NOT_ON_WINDOWS

        if sys.platform == "win32":
            print(f"quire: {NOT_ON_WINDOWS}", file=sys.stderr)
            raise SystemExit(2)
        from quire.core.process import gc_frozen_imports

        with gc_frozen_imports():
            from quire.cli.main import main as work
        work()
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
