"""What the page /engine shows: KV blocks by state and owner, the prefix tree, recent steps, the queue.

Plain numbers only. Steps are recorded only while the view is watched: from a query on, until none has come for some
seconds. Does not depend on HTTP, and holds nothing of prompts or outputs.
"""

import secrets
from collections import Counter, deque
from collections.abc import Callable
from itertools import takewhile
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.core.ids import Row
from quire.core.request import RequestGroup, Sequence, SequenceState
from quire.kv.radix_tree import NodeView
from quire.sched.policy import Policy
from quire.sched.scheduler import Scheduler

MAX_CELLS = 2048  # of the map: a larger pool shows several blocks as one cell
MAX_STEPS = 512  # recorded
MAX_NODES = 128  # of the prefix tree
MAX_COMPARED = 256  # nodes of the prefix tree that are looked at, to choose those
MAX_QUEUED = 2000  # groups that are counted by class and tenant
WATCHED_S = 5.0  # after a query

_NO_OWNER = -1


class StepView(NamedTuple):
    """One step: when it ended, how long it took the loop, and what each row did."""

    step: int
    end_s: float
    seconds: float
    prefills: tuple[tuple[Row | None, int], ...]  # row and prompt tokens
    decodes: NDArray[np.bool_]  # by row
    num_preemptions: int


class _DecodingRow(NamedTuple):
    """The description of a decoding sequence, which changes with its row only."""

    row: Row | None
    num_preemptions: int
    encoded: msgspec.Raw


class ScheduledEngine(Protocol):
    """What is viewed: an engine, or the replay of one's decisions."""

    @property
    def scheduler(self) -> Scheduler: ...


class EngineView:
    """Records the steps of an engine while it is watched, and describes its state."""

    def __init__(
        self,
        engine: ScheduledEngine,
        clock: Callable[[], float],
        watched_s: float = WATCHED_S,
        number: int | None = None,  # tells its steps from another engine's; None: any
    ) -> None:
        self._engine = engine
        self._number = secrets.randbits(32) if number is None else number
        self._clock = clock
        self._watched_s = watched_s
        self._watched_until_s = -1.0
        self._steps: deque[StepView] = deque(maxlen=MAX_STEPS)
        self._last_noted = -1
        self._prefilling: list[Sequence] = []  # not caught up after that step
        self._planned: dict[int, int] = {}  # tokens computed of those, by id
        self._decoding: dict[int, _DecodingRow] = {}  # sequences as described before, by id
        self._num_preemptions = 0

    def note_step(self, started_s: float) -> None:
        """After a step. Costs a comparison while the view is not watched."""
        now_s = self._clock()
        if now_s > self._watched_until_s:
            return
        scheduler, before = self._engine.scheduler, self._planned
        step = scheduler.last_absorbed
        # Sequences are looked at if they were incomplete before, or were assigned since then: not all that decode.
        known = {each.id: each for each in self._prefilling if each.state is SequenceState.RUNNING}
        known.update((each.id, each) for each in scheduler.assigned_after(self._last_noted))
        prefilling = [
            each for each in known.values() if not each.caught_up or each.id in before or each.assigned_step == step
        ]
        decoding = scheduler.running_rows()
        if prefilling:
            decoding[[each.row for each in prefilling if each.row is not None]] = False
        prefills = [
            (each.row, max(each.num_planned - before.get(each.id, each.group.num_cached), 0)) for each in prefilling
        ]
        self._prefilling = [each for each in prefilling if not each.caught_up]
        self._planned = {each.id: each.num_planned for each in self._prefilling}
        self._last_noted = step
        total = scheduler.num_preemptions
        num_preemptions = total - self._num_preemptions
        self._steps.append(StepView(step, now_s, now_s - started_s, tuple(prefills), decoding, num_preemptions))
        self._num_preemptions = total

    def describe(self, since: int) -> dict[str, object]:
        """The state now, and the recorded steps after step `since`."""
        now_s = self._clock()
        if now_s > self._watched_until_s:
            self._steps.clear()
            self._planned.clear()
            self._prefilling.clear()
            self._last_noted = -1
            self._num_preemptions = self._engine.scheduler.num_preemptions
        self._watched_until_s = now_s + self._watched_s
        scheduler, pool = self._engine.scheduler, self._engine.scheduler.kv.pool
        running = scheduler.running_sequences()
        states, owners = self._cells()
        return {
            "engine": self._number,
            "now_s": now_s,
            "step": scheduler.last_absorbed,
            "num_blocks": pool.num_blocks,
            "block_size": scheduler.kv.block_size,
            "num_free": pool.num_free,
            "num_cached": pool.num_cached,
            "num_evictable": pool.num_evictable,
            "num_host": 0 if scheduler.kv.host is None else scheduler.kv.host.num_blocks - scheduler.kv.host.num_free,
            "max_rows": scheduler.max_rows,
            "itl_target_s": _said_target_s(scheduler.policy),
            "states": states,
            "owners": owners,
            "rows": self._rows(running),
            "queue": _queue(scheduler.groups()) if scheduler.num_waiting else [],
            "tree": self._tree(),
            "num_nodes": 0 if scheduler.kv.tree is None else scheduler.kv.tree.num_nodes,
            "num_waiting": scheduler.num_waiting,
            "waiting_for": None if scheduler.wait_cause is None else scheduler.wait_cause.value,
            "steps": self._steps_after(since),
        }

    def _steps_after(self, since: int) -> list[dict[str, object]]:
        """Steps, their decodes as a digit for each row: 1 if it decodes."""
        steps = list(takewhile(lambda each: each.step > since, reversed(self._steps)))[::-1]
        if not steps:
            return []
        digits = _digits(np.stack([each.decodes for each in steps]).view(np.uint8))
        width = len(digits) // len(steps)
        return [
            {**each._asdict(), "decodes": digits[place * width : (place + 1) * width]}
            for place, each in enumerate(steps)
        ]

    def _rows(self, running: list[Sequence]) -> list[object]:
        """Each running sequence. Those that decode are encoded once."""
        known, rows = self._decoding, list[object]()
        for sequence in running:
            before, group = known.get(sequence.id), sequence.group
            if before is None or before.row != sequence.row or before.num_preemptions != group.num_preemptions:
                view = _row(sequence)
                if not sequence.caught_up:
                    rows.append(view)
                    continue
                encoded = msgspec.Raw(msgspec.json.encode(view))
                before = known[sequence.id] = _DecodingRow(sequence.row, group.num_preemptions, encoded)
            rows.append(before.encoded)
        if len(known) > 2 * len(running):
            self._decoding = {each.id: known[each.id] for each in running if each.id in known}
        return rows

    def _tree(self) -> list[NodeView]:
        """The most used part of the prefix tree: parent, blocks, hits and whether it is on the host, of each node."""
        tree = self._engine.scheduler.kv.tree
        return [] if tree is None else tree.outline(MAX_NODES, MAX_COMPARED)

    def _cells(self) -> tuple[str, list[int]]:
        """The state of each cell as a digit (`BlockPool.states`), and the row that owns it or -1. Of several blocks in
        one cell, the one that is used most counts."""
        kv = self._engine.scheduler.kv
        states = kv.pool.states()
        per_cell = max(-(-len(states) // MAX_CELLS), 1)
        owners = np.full(-(-len(states) // per_cell), _NO_OWNER, dtype=np.int32)
        rows, blocks = kv.tables.held(np.flatnonzero(self._engine.scheduler.running_rows()))
        owners[(blocks - 1) // per_cell] = rows  # block 0 is the null block
        if per_cell > 1:
            padded = np.pad(states, (0, len(owners) * per_cell - len(states)))
            states = padded.reshape(-1, per_cell).T.copy().max(axis=0)  # in a fifth of the time of rows of a few
        return _digits(states), owners.tolist()


def _digits(values: NDArray[np.uint8]) -> str:
    return (values + np.uint8(ord("0"))).tobytes().decode("ascii")


def _row(sequence: Sequence) -> dict[str, object]:
    group, num_prompt = sequence.group, len(sequence.group.request.prompt)
    return {
        "row": sequence.row,
        "request": group.request.id,
        "decoding": sequence.caught_up,
        "num_prompt": num_prompt,
        "num_computed": min(sequence.num_computed, num_prompt),  # of the prompt
        "num_cached": group.num_cached,
        "num_preemptions": group.num_preemptions,
        "arrived_s": group.arrived_s,
    }


def _said_target_s(policy: Policy) -> float | None:
    """The target of step times that the settings name. Where they name none, it grows with the decoding rows."""
    return None if policy.itl_per_decode else policy.itl_target_s


def _queue(groups: tuple[RequestGroup, ...]) -> list[dict[str, object]]:
    """Waiting requests by priority class and tenant."""
    counted: Counter[tuple[int, str]] = Counter()
    num_counted = 0
    for group in groups:
        sequences = group.sequences
        if sequences[0].state is not SequenceState.WAITING or num_counted == MAX_QUEUED:
            continue
        if len(sequences) == 1 or all(each.state is SequenceState.WAITING for each in sequences):
            counted[group.request.priority, group.request.tenant] += 1
            num_counted += 1
    return [
        {"priority": priority, "tenant": tenant, "num_requests": count}
        for (priority, tenant), count in sorted(counted.items())
    ]
