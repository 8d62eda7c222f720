"""The openai client as it is installed here: the same script as `make test-clients` runs in environments of its own."""

import sys
from pathlib import Path

from tests.clients.client_world import MODEL, world
from tests.clients.environments import SCRIPTS, errors, outcomes


def test_the_openai_client(tmp_path: Path, default_model_path: Path) -> None:
    with world(tmp_path) as url:
        went = outcomes(sys.executable, str(SCRIPTS / "use_openai.py"), url, MODEL)
    assert errors(went) == {}
