"""A server with the keys of two tenants, and a table of what was seen."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.conftest import report as report
from tests.server.scripted_servers import scripted
from tests.server.server_process import Running

NUM_ROWS = 64
HOSTILE = {"Authorization": "Bearer sk-hostile"}
INNOCENT = {"Authorization": "Bearer sk-innocent"}


@pytest.fixture(scope="session")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("attack")
    keys = folder / "keys"
    keys.write_text("sk-hostile name=hostile\nsk-innocent name=innocent\n")
    starts = ("--max-num-seqs", str(NUM_ROWS), "--max-waiting", str(NUM_ROWS), "--api-key-file", str(keys))
    with scripted(folder, *starts) as running:
        yield running
