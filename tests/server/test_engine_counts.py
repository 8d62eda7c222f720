"""What an engine counts: kept when it dies, whether or not anybody had asked for it, and true of what was said."""

from dataclasses import fields, replace

import pytest

from quire.engine.stats import EngineStats
from quire.server.async_engine import AsyncEngine
from quire.server.metrics import EngineGauges, Metrics
from quire.server.server import StatusLine
from tests.server.scripted_servers import asked
from tests.server.server_process import Running, counted, wait_until, wait_until_at_rest

NOTHING = EngineStats(**{field.name: 0 for field in fields(EngineStats)} | {"waiting_for": None})  # type: ignore[arg-type]


class Engine:
    """What the last beat of one told; None between two."""

    def __init__(self) -> None:
        self.stats: EngineStats | None = None

    def count(self, num_tokens: int) -> None:
        self.stats = replace(NOTHING, prompt_tokens=num_tokens)


def test_what_the_last_beat_told_is_kept_though_nobody_read_it() -> None:
    engine = Engine()
    gauges = EngineGauges(lambda: engine.stats)
    engine.count(10)
    assert gauges.total("prompt_tokens") == 10
    engine.count(700)  # after the last who asked
    gauges.note_loss()
    engine.stats = None
    assert gauges.total("prompt_tokens") == 700
    engine.count(5)
    assert gauges.total("prompt_tokens") == 705


def test_a_loss_that_is_told_twice_counts_once() -> None:
    engine = Engine()
    gauges = EngineGauges(lambda: engine.stats)
    engine.count(10)
    gauges.note_loss()
    engine.stats = None
    gauges.note_loss()
    assert gauges.total("prompt_tokens") == 10


def test_a_prompt_that_is_not_computed_yet_takes_nothing_from_what_is_said() -> None:
    service = AsyncEngine(None, lambda: 0.0)
    clock = iter([0.0, 10.0]).__next__
    service.stats = replace(NOTHING, num_running=1)
    status = StatusLine(service, Metrics(lambda: service.stats, lambda: 0.0), clock)
    service.stats = replace(NOTHING, num_running=2, prompt_tokens=8000, computed_tokens=512, sampled_tokens=50)
    assert str(status.line()).startswith("gen 5.0 tok/s · prompt 800 tok/s · run 2")


@pytest.mark.parametrize("wish", [{}, {"n": 3}, {"n": 2, "use_beam_search": True}, {"max_tokens": 1}])
def test_what_was_sampled_is_what_was_told(scripted_server: Running, wish: dict[str, object]) -> None:
    with scripted_server.client() as client:
        wait_until_at_rest(client)
        before = counted(client, "sampled_tokens_total")
        usage = client.post("/v1/completions", json=asked("hi", **wish)).json()["usage"]
        wait_until(lambda: counted(client, "sampled_tokens_total") - before == usage["completion_tokens"])


@pytest.mark.parametrize("wish", [{}, {"n": 2, "use_beam_search": True}])
def test_what_the_cache_gave_is_told_to_beams_too(scripted_server: Running, wish: dict[str, object]) -> None:
    body = asked(f"the same words again and again {sorted(wish)} " * 8, **wish)
    with scripted_server.client() as client:
        waited = counted(client, "request_queue_time_seconds_count")
        usages = [client.post("/v1/completions", json=body).json()["usage"] for _ in range(2)]
        assert usages[1]["prompt_tokens_details"]["cached_tokens"] > 50
        assert counted(client, "request_queue_time_seconds_count") == waited + 2
