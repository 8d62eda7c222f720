"""Lets the real pip find a wheel built in the test, without a network."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.catalog.tiny import build_wheel


@pytest.fixture
def serve_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, bytes]], Path]:
    """Makes pip find a wheel with these members, and nothing else."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))

    def serve(sequences: dict[str, bytes]) -> Path:
        return build_wheel(links, sequences)

    return serve
