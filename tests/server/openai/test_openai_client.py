"""The openai client as it is installed here: the same script as `make test-clients` runs in environments of its own."""

import sys
from pathlib import Path

import pytest

from tests.clients import client_world
from tests.clients.client_world import MODEL, world
from tests.clients.environments import SCRIPTS, errors, outcomes
from tests.server.api_server import scripted_server


def test_the_openai_client(tmp_path: Path, default_model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_world, "scripted", scripted_server)
    with world(tmp_path) as url:
        went = outcomes(sys.executable, str(SCRIPTS / "use_openai.py"), url, MODEL)
    assert errors(went) == {}
