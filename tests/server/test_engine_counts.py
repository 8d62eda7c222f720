"""Counters of the engine: kept when it dies, with or without a scrape, and equal to what was delivered."""

from dataclasses import fields, replace

import pytest

from quire.engine.stats import EngineStats
from quire.server.async_engine import AsyncEngine
from quire.server.metrics import EngineGauges, Metrics
from quire.server.server import StatusLine
from tests.server.local_server import LocalServer
from tests.server.scripted_servers import completion_body
from tests.server.server_process import counted, wait_until, wait_until_at_rest

NOTHING = EngineStats(**{field.name: 0 for field in fields(EngineStats)} | {"waiting_for": None})  # type: ignore[arg-type]


class Engine:
    """The stats of the last heartbeat; None between two engines."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def count(self, num_tokens: int) -> None:
        self.stats = replace(NOTHING, prompt_tokens=num_tokens)


def test_counts_of_the_last_heartbeat_are_kept_without_a_scrape() -> None:
    engine = Engine()
    gauges = EngineGauges(lambda: engine.stats)
    engine.count(10)
    assert gauges.total("prompt_tokens") == 10
    engine.count(700)  # after the last scrape
    gauges.note_loss()
    engine.stats = None
    assert gauges.total("prompt_tokens") == 700
    engine.count(5)
    assert gauges.total("prompt_tokens") == 705


def test_a_loss_that_is_reported_twice_counts_once() -> None:
    engine = Engine()
    gauges = EngineGauges(lambda: engine.stats)
    engine.count(10)
    gauges.note_loss()
    engine.stats = None
    gauges.note_loss()
    assert gauges.total("prompt_tokens") == 10


def test_an_uncomputed_prompt_does_not_lower_the_sampled_count() -> None:
    engine = AsyncEngine(None, lambda: 0.0)
    clock = iter([0.0, 10.0]).__next__
    engine.stats = replace(NOTHING, num_running=1)
    status = StatusLine(engine, Metrics(lambda: engine.stats, lambda: 0.0), clock)
    engine.stats = replace(NOTHING, num_running=2, prompt_tokens=8000, computed_tokens=512, sampled_tokens=50)
    assert str(status.line()).startswith("gen 5.0 tok/s · prompt 800 tok/s · run 2")


@pytest.mark.parametrize("options", [{}, {"n": 3}, {"n": 2, "use_beam_search": True}, {"max_tokens": 1}])
def test_sampled_tokens_equal_delivered_tokens(scripted_server: LocalServer, options: dict[str, object]) -> None:
    with scripted_server.client() as client:
        wait_until_at_rest(client)
        before = counted(client, "sampled_tokens_total")
        usage = client.post("/v1/completions", json=completion_body("hi", **options)).json()["usage"]
        wait_until(lambda: counted(client, "sampled_tokens_total") - before == usage["completion_tokens"])


@pytest.mark.parametrize("options", [{}, {"n": 2, "use_beam_search": True}])
def test_cached_tokens_are_reported_for_beams_too(scripted_server: LocalServer, options: dict[str, object]) -> None:
    body = completion_body(f"the same words again and again {sorted(options)} " * 8, **options)
    with scripted_server.client() as client:
        waited = counted(client, "request_queue_time_seconds_count")
        usages = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
        assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 50
        assert counted(client, "request_queue_time_seconds_count") == waited + 2
