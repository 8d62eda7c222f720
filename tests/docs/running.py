"""Runs what a page shows, as a user would."""

import sys

from tests import children


def output_of(code: str) -> str:
    result = children.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout
