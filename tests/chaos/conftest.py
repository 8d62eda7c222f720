"""A server that takes a beating, and a table of what was seen."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.server.scripted_servers import scripted
from tests.server.server_process import Running

Report = Callable[[str, object], None]
Dose = Callable[[int], int]
Dice = Callable[[int], random.Random]

NUM_ROWS = 64


@pytest.fixture(scope="session")
def server(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    starts = ("--max-num-seqs", str(NUM_ROWS), "--max-waiting", str(NUM_ROWS))
    with scripted(tmp_path_factory.mktemp("chaos"), *starts) as running:
        yield running


@pytest.fixture(scope="session")
def report() -> Iterator[Report]:
    """Records a figure; all of them are printed at the end."""
    figures: list[tuple[str, object]] = []
    yield lambda what, figure: figures.append((what, figure))
    width = max((len(what) for what, _ in figures), default=0)
    print("\n" + "\n".join(f"| {what:<{width}} | {figure} |" for what, figure in figures))
