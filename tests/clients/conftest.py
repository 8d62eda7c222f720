"""One scripted server for all clients."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.client_world import world


@pytest.fixture(scope="session")
def scripted_url(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[str]:
    with world(tmp_path_factory.mktemp("world")) as url:
        yield url
