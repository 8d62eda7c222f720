"""The engine never refuses what admission control admits: bursts, disconnects and ends in any order."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.config import EngineConfig
from quire.core.errors import QueueFull
from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.messages import AddRequest
from quire.engine.scripted_engine import build_scripted
from quire.engine.startup import StartupReporter
from quire.server.fair_shares import reserve_of
from quire.server.server import with_burst_queue

ROWS, WAITING = 3, 2
CONFIG = with_burst_queue(EngineConfig(max_num_seqs=ROWS, max_model_len=64), WAITING)
PARAMS = SamplingParams(temperature=0.0, max_tokens=4)


@pytest.fixture(scope="module")
def engine(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    script = tmp_path_factory.mktemp("script") / "lines.jsonl"
    script.write_text('{"say": "one two three four five six", "end": false}')
    return build_scripted(CONFIG, script, StartupReporter())[0]


class Front:
    """Counts as admission control does: requests that are admitted and have neither ended nor disconnected."""

    numbers = iter(range(10**9))

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.inside: list[int] = []

    @property
    def full(self) -> bool:
        return len(self.inside) >= ROWS + WAITING + reserve_of(ROWS + WAITING)

    def arrive(self) -> None:
        number = next(self.numbers)
        self.engine.submit(AddRequest(number, [5, 6, 7], PARAMS))
        self.inside.append(number)

    def disconnect(self, place: int) -> None:
        self.engine.abort(self.inside.pop(place % len(self.inside)))

    def turn(self) -> None:
        progress = self.engine.step()
        ended = () if progress is None else progress.finished
        self.inside = [number for number in self.inside if number not in {over.number for over in ended}]

    def disconnect_all(self) -> None:
        while self.inside:
            self.disconnect(0)
        while not self.engine.idle:
            self.engine.step()


@given(st.lists(st.one_of(st.just("arrive"), st.just("turn"), st.integers(0, 9)), max_size=60))
def test_the_engine_accepts_every_admitted_request(engine: Engine, happenings: list[str | int]) -> None:
    front = Front(engine)
    try:
        for happening in happenings:
            if happening == "turn":
                front.turn()
            elif happening == "arrive":
                if not front.full:
                    front.arrive()
            elif front.inside:
                front.disconnect(int(happening))
    finally:
        front.disconnect_all()


def test_the_engine_has_a_bound_of_its_own(engine: Engine) -> None:
    front = Front(engine)
    assert CONFIG.max_waiting is not None
    try:
        for _ in range(CONFIG.max_waiting):
            front.arrive()
        with pytest.raises(QueueFull):
            front.arrive()
    finally:
        front.disconnect_all()
