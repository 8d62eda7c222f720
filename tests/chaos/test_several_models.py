"""Two models in processes of their own, as a user starts them: the engine of one is killed while both serve."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.server.server_process import serving
from tests.server.several_models import SIZES, answer, ask, endless, statuses, write_slow, write_tables

pytestmark = pytest.mark.usefixtures("default_model_path")


def test_a_killed_engine_is_replaced_while_the_other_model_serves(tmp_path: Path) -> None:
    """With processes, as a user starts them."""
    write_slow(tmp_path, "a")
    config = write_tables(tmp_path, a={}, b={"pinned": True})
    with (
        serving("--config", str(config), "--models-memory", "2GiB", *SIZES) as server,
        server.client() as client,
        ThreadPoolExecutor(4) as pool,
    ):
        assert statuses(client) == {"a": "unloaded", "b": "loaded"}
        [pinned] = server.children("quire.engine.engine_main")
        assert answer(ask(client, "a")) == "I am a."
        [other] = set(server.children("quire.engine.engine_main")) - {pinned}
        with client.stream("POST", "/v1/completions", json=endless("a")) as stream:
            pieces = stream.iter_raw()
            next(pieces)
            os.kill(other, signal.SIGKILL)
            assert b"engine_lost" in b"".join(pieces)
        answers = list(pool.map(lambda name: answer(ask(client, name)), ["b", "a", "b", "a", "b"]))
        assert answers == ["I am b.", "I am a.", "I am b.", "I am a.", "I am b."]
        assert server.children("quire.engine.engine_main").count(pinned) == 1
