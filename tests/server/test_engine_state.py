"""The state of the engine for many watchers: the engine is asked rarely, and each gets the steps it has not seen."""

import asyncio
import json
from typing import Any

from quire.server.engine_state import EngineState


class View:
    """An engine that makes one step between two questions."""

    def __init__(self) -> None:
        self.num_asked, self.step, self.now_s = 0, 10, 0.0
        self.restarted = False

    async def query(self, what: str, since: int) -> bytes:
        assert what == "view"
        await asyncio.sleep(0)
        self.num_asked += 1
        self.step += 1
        steps = [{"step": number} for number in range(max(since + 1, 0), self.step + 1)]
        queue = [{"tenant": "a", "num_requests": 1}, {"tenant": "b", "num_requests": 2}]
        return json.dumps({"step": self.step, "queue": queue, "steps": steps}).encode()

    async def ask(self, state: EngineState, since: int = -1, own: str | None = None) -> dict[str, Any]:
        return json.loads(await state.describe(since, own))  # type: ignore[no-any-return]


def test_a_flood_of_requests_asks_the_engine_a_few_times_a_second() -> None:
    async def flood() -> int:
        view = View()
        state = EngineState(view.query, lambda: view.now_s)
        for _ in range(100):
            await asyncio.gather(*[view.ask(state) for _ in range(50)])
            view.now_s += 0.01
        return view.num_asked

    assert 20 <= asyncio.run(flood()) <= 26


def test_a_watcher_gets_each_step_once_and_the_names_of_its_own_requests() -> None:
    async def watch() -> None:
        view = View()
        state = EngineState(view.query, lambda: view.now_s)
        first = await view.ask(state, own="b")
        assert first["step"] == 11 and [each["step"] for each in first["steps"]] == list(range(12))
        assert [entry["tenant"] for entry in first["queue"]] == ["others", "b"]
        later = await view.ask(state, since=11)
        assert [each["step"] for each in later["steps"]] == [12] and later["queue"][0]["tenant"] == "a"
        view.step = 2  # another engine, which has made fewer steps
        assert (await view.ask(state, since=12))["steps"] == []
        assert [each["step"] for each in (await view.ask(state))["steps"]] == list(range(5))
        view.now_s += 60
        assert [each["step"] for each in (await view.ask(state))["steps"]] == list(range(6))

    asyncio.run(watch())
