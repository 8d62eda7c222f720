"""The state behind the page /engine: what each row did in each step, whose blocks they are, who waits."""

import gc
import json
import random
from collections.abc import Callable

import numpy as np

from quire.core.ids import RequestId, Row
from quire.core.request import RequestGroup, Sequence
from quire.core.sampling import SamplingParams
from quire.engine.engine import MAX_REMEMBERED, Engine
from quire.engine.engine_view import MAX_CELLS, MAX_STEPS, WATCHED_S, EngineView
from quire.engine.messages import AddRequest, RequestOptions
from quire.engine.request_validator import RequestValidator
from quire.engine.wire import as_json
from quire.kv.manager import KVManager
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler
from quire.sim.runners import ToyRunner

VOCAB, BLOCK = 50, 4


class Watched:
    """An engine on a clock of its own, and its view."""

    def __init__(
        self, num_blocks: int = 400, max_rows: int = 2, max_step_tokens: int = 16, policy: Policy | None = None
    ) -> None:
        self.now_s = 0.0
        clock: Callable[[], float] = lambda: self.now_s  # noqa: E731
        validator = RequestValidator(
            vocab_size=VOCAB, end_ids=(), max_length=1000, max_rows=max_rows, num_blocks=num_blocks, block_size=BLOCK
        )
        kv = KVManager(num_blocks, BLOCK, max_rows)
        scheduler = Scheduler(kv, max_rows=max_rows, max_step_tokens=max_step_tokens, policy=policy)
        self.engine = Engine(scheduler, ToyRunner(VOCAB), validator, depth=0, seed=0, clock=clock)
        self.view = EngineView(self.engine, clock)

    def submit(self, number: int, num_prompt: int, max_tokens: int = 100, **options: object) -> None:
        params = SamplingParams(temperature=0, max_tokens=max_tokens)
        prompt = [(number * 7 + i) % VOCAB for i in range(num_prompt)]
        self.engine.submit(AddRequest(number, prompt, params, options=RequestOptions(**options)))  # type: ignore[arg-type]

    def step(self, seconds: float = 0.01) -> None:
        started_s = self.now_s
        self.engine.step()
        self.now_s += seconds
        self.view.note_step(started_s)

    def describe(self, since: int = -1) -> dict[str, object]:
        return json.loads(as_json(self.view.describe(since)))  # type: ignore[no-any-return]


def test_each_row_of_each_step_is_a_chunk_or_a_decode() -> None:
    watched = Watched()
    watched.describe()
    watched.submit(1, 40)
    for _ in range(5):
        watched.step()
    steps = watched.describe()["steps"]
    assert isinstance(steps, list)
    assert [step["prefills"] for step in steps] == [[[0, 16]], [[0, 16]], [[0, 8]], [], []], "40 tokens, 16 in a step"
    assert [step["decodes"] for step in steps] == ["00", "00", "00", "10", "10"], "a digit for each row"
    assert [round(step["seconds"], 3) for step in steps] == [0.01] * 5
    assert [step["step"] for step in watched.describe(since=2)["steps"]] == [3, 4], "only what is new"


def test_the_target_of_step_times_is_shown_where_the_settings_name_one() -> None:
    grows = Policy(itl_target_s=0.04, itl_per_decode=1.5)
    assert Watched(policy=grows).describe()["itl_target_s"] is None
    assert Watched().describe()["itl_target_s"] is None
    assert Watched(policy=Policy(itl_target_s=0.04)).describe()["itl_target_s"] == 0.04


def test_a_prompt_of_one_step_is_a_chunk_too() -> None:
    watched = Watched()
    watched.describe()
    watched.submit(1, 9)
    watched.step()
    watched.submit(2, 5)
    watched.step()
    first, second = watched.describe()["steps"]  # type: ignore[misc]
    assert (first["prefills"], first["decodes"]) == ([[0, 9]], "00")
    assert (second["prefills"], second["decodes"]) == ([[1, 5]], "10")


def described(sequence: Sequence) -> dict[str, object]:
    group = sequence.group
    num_prompt = len(group.request.prompt)
    return {
        "row": sequence.row, "request": group.request.id, "decoding": sequence.caught_up, "num_prompt": num_prompt,
        "num_computed": min(sequence.num_computed, num_prompt), "num_cached": group.num_cached,
        "num_preemptions": group.num_preemptions, "arrived_s": group.arrived_s,
    }  # fmt: skip


def test_the_rows_of_a_step_are_those_found_by_looking_at_every_sequence() -> None:
    num_preemptions = 0
    for seed in range(12):
        dice = random.Random(seed)
        watched = Watched(dice.choice((40, 90)), dice.choice((2, 5, 9)), dice.choice((12, 40)))
        scheduler, before, number = watched.engine.scheduler, dict[int, int](), 0
        for _ in range(60):
            while dice.random() < 0.4:
                number += 1
                watched.submit(number, dice.randrange(1, 60), max_tokens=dice.randrange(1, 40))
            if dice.random() < 0.1:
                watched.engine.abort(dice.randrange(number + 1))
            watched.describe(since=10**6)
            watched.step()
            running, step = scheduler.running_sequences(), scheduler.last_absorbed
            chunks = [each for each in running if not each.caught_up or each.id in before or each.assigned_step == step]
            view = watched.describe(since=step - 1)
            assert view["rows"] == [described(each) for each in running], "also those described before"
            owners = np.full(scheduler.kv.pool.num_blocks, -1)
            for each in sorted(running, key=lambda each: each.row or 0):
                owners[scheduler.kv.tables.of(Row(each.row or 0)) - 1] = each.row
            assert view["owners"] == owners.tolist()
            (noted,) = view["steps"][-1:]  # type: ignore[index]
            decoding = {each.row for each in running if each not in chunks}
            assert noted["decodes"] == "".join("01"[row in decoding] for row in range(scheduler.max_rows))
            tokens = {
                each.row: max(each.num_planned - before.get(each.id, each.group.num_cached), 0) for each in chunks
            }
            assert dict(noted["prefills"]) == tokens
            before = {each.id: each.num_planned for each in chunks if not each.caught_up}
        num_preemptions += scheduler.num_preemptions
    assert num_preemptions > 0


def test_nothing_is_recorded_while_it_is_not_watched() -> None:
    watched = Watched()
    watched.submit(1, 8)
    for _ in range(4):
        watched.step()
    assert watched.describe()["steps"] == []
    watched.step()
    assert len(watched.describe()["steps"]) == 1
    watched.now_s += WATCHED_S + 1
    watched.step()
    assert watched.describe()["steps"] == [], "those before are forgotten"


def test_the_record_is_bounded() -> None:
    watched = Watched()
    watched.submit(1, 4, max_tokens=900)
    for _ in range(MAX_STEPS + 50):
        watched.describe(since=10**6)
        watched.step(0.001)
    assert len(watched.describe()["steps"]) == MAX_STEPS


def test_the_map_has_states_and_owners() -> None:
    watched = Watched()
    for number in (1, 2):
        watched.submit(number, 8)
        watched.step()
    view = watched.describe()
    states, owners = view["states"], view["owners"]
    assert isinstance(states, str) and isinstance(owners, list)
    assert len(states) == len(owners) == 400
    pool = watched.engine.scheduler.kv.pool
    assert states.count("0") == pool.num_free == view["num_free"]
    assert {owner for owner in owners if owner >= 0} == {0, 1}
    for row in (0, 1):
        held = watched.engine.scheduler.kv.tables.of(row).tolist()  # type: ignore[arg-type]
        assert {place for place, owner in enumerate(owners, start=1) if owner == row} == set(held)
        assert all(states[block - 1] in "23" for block in held)
    watched.engine.abort(1)
    watched.engine.abort(2)
    watched.step()
    assert set(watched.describe()["states"]) <= {"0", "1"}, "what is not held is free or cached"  # type: ignore[arg-type]


def test_a_large_pool_is_shown_in_fewer_cells() -> None:
    watched = Watched(num_blocks=5000)
    watched.submit(1, 8)
    watched.step()
    view = watched.describe()
    assert len(view["states"]) == len(view["owners"]) == 1667 <= MAX_CELLS  # type: ignore[arg-type]
    assert view["num_blocks"] == 5000 and 0 in view["owners"]  # type: ignore[operator]


def test_running_and_waiting_requests_are_listed() -> None:
    watched = Watched(max_rows=2)
    for number in range(1, 7):
        watched.submit(number, 8, tenant="a" if number % 2 else "b", priority=5 if number == 6 else 0)
    watched.step()
    view = watched.describe()
    rows, queue = view["rows"], view["queue"]
    assert isinstance(rows, list) and isinstance(queue, list)
    assert {row["row"] for row in rows} <= {0, 1} and all(row["num_prompt"] == 8 for row in rows)
    assert len(rows) + sum(entry["num_requests"] for entry in queue) == 6
    assert {"priority": 5, "tenant": "b", "num_requests": 1} in queue
    assert view["num_waiting"] == 6 - len(rows)


def test_the_prefix_tree_has_its_hits() -> None:
    watched = Watched(max_rows=4)
    for _ in range(3):
        watched.submit(1, 20, max_tokens=1)
        while watched.engine.scheduler.num_waiting or watched.engine.scheduler.running_sequences():
            watched.step()
    watched.submit(2, 20, max_tokens=1)
    for _ in range(4):
        watched.step()
    view = watched.describe()
    tree = view["tree"]
    assert isinstance(tree, list) and view["num_nodes"] == len(tree)
    assert all(-1 <= parent < place for place, (parent, *_) in enumerate(tree)), "parents first"
    assert sum(blocks for _, blocks, _, _ in tree) == view["num_cached"]
    assert sum(hits for _, _, hits, _ in tree) == 2, "the second and the third of one prompt"
    assert tree[0][2] or any(hits for parent, _, hits, _ in tree if parent == 0), "the one with hits is first"


def test_finished_requests_are_freed_without_a_garbage_collection() -> None:
    """A full collection of a served engine may be an hour away: what waits for one looks like a leak."""

    def existing() -> list[object]:
        return [each for each in gc.get_objects() if type(each) in (RequestGroup, Sequence)]

    watched = Watched(max_rows=8)
    gc.collect()
    gc.disable()
    try:
        others = set(map(id, existing()))  # of other tests
        for number in range(2 * MAX_REMEMBERED):
            watched.submit(number, 3, max_tokens=2)
            watched.step()
        held = [each for each in existing() if id(each) not in others]
    finally:
        gc.enable()
    num_open = watched.engine.scheduler.num_running + watched.engine.scheduler.num_waiting
    assert len(held) <= 2 * (MAX_REMEMBERED + num_open + 1)
    assert watched.engine.explain(RequestId(2 * MAX_REMEMBERED - 5)).ending is not None, "the latest are kept"
