"""What an engine had counted when it died is kept, whether or not anybody had asked for it."""

from dataclasses import fields, replace

from quire.engine.stats import Stats
from quire.server.metrics import EngineGauges

NOTHING = Stats(**{field.name: 0 for field in fields(Stats)} | {"waiting_for": None})  # type: ignore[arg-type]


class Engine:
    """What the last beat of one told; None between two."""

    def __init__(self) -> None:
        self.stats: Stats | None = None

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
