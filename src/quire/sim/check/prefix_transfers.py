"""Prefixes that other engines read and fill during a check, at random, as in a prefill/decode split.

What a hold has cached holds its tokens until the hold ends: another engine may read it at any moment. Its room belongs
to the other engine, which fills it at some time before the hold ends, or never; what is filled may be cached or not. A
hold that ended with lost steps is filled no more, and its late release does nothing. Requests that wait for the blocks
of holds wait no longer than these last: with nothing else to do all of them end.
"""

import random
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from quire.core.ids import IntArray, RequestId
from quire.core.moves import Tier
from quire.core.request import BlockOwner
from quire.core.step import Runner
from quire.kv.prefix_holds import MAX_HELD_SHARE, HeldPrefix
from quire.sched.scheduler import Scheduler
from quire.sim.check.invariants import InFlightWatch, Readable
from quire.sim.check.scenario import VOCAB_SIZE, Scenario

_FIRST_NUMBER = 1_000_000  # of the requests that they are held for: those of the check have lower ones


@runtime_checkable
class WritableRunner(Protocol):
    """A runner whose blocks can be written from outside."""

    def fill(self, blocks: IntArray, tokens: IntArray, start: int) -> None:
        """Write these tokens, from position `start` on, into whole blocks of the device."""


@dataclass(slots=True)
class _OpenTransfer:
    held: HeldPrefix
    filled: bool = False


class PrefixTransfers:
    """Begins, fills and ends holds between two steps, and checks that they keep their blocks."""

    def __init__(self, scheduler: Scheduler, scenario: Scenario, watch: InFlightWatch, rng: random.Random) -> None:
        self._scheduler = scheduler
        self._scenario = scenario
        self._watch = watch
        self._rng = rng
        self._open: list[_OpenTransfer] = []
        self._num_begun = 0

    def turn(self, runner: Runner, past: list[IntArray], *, hurry: bool) -> None:
        """Between two steps. `hurry`: nothing advances, so all holds end."""
        self._check_leased(runner)
        for transfer in self._open.copy():
            if self._rng.random() < 0.5:
                self._fill(transfer, runner)
            if hurry or self._rng.random() < 0.3:
                self._end(transfer)
        if not hurry and self._rng.random() < 0.4:
            self._begin(past)
            if self._open and self._rng.random() < 0.5:
                self._fill(self._open[-1], runner)
        self._watch.holds = dict(self._scheduler.kv.holds.held)

    def end_all(self) -> None:
        for transfer in self._open.copy():
            self._end(transfer)
        self._watch.holds = {}

    def _begin(self, past: list[IntArray]) -> None:
        rng, scenario = self._rng, self._scenario
        known = rng.choice(past) if past and rng.random() < 0.7 else scenario.shared_prefix
        fresh = [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice((0, 0, 2 * scenario.block_size)))]
        tokens = np.concatenate([known[: rng.randint(1, len(known))], np.array(fresh, dtype=np.int32)])
        owner = BlockOwner(RequestId(_FIRST_NUMBER + self._num_begun), rng.choice(scenario.partitions), 0)
        self._num_begun += 1
        held = self._scheduler.hold_prefix(owner, tokens, with_room=rng.random() < 0.5)
        if held is not None:
            self._open.append(_OpenTransfer(held))
            num_held, most = self._scheduler.kv.holds.num_blocks, scenario.num_blocks // MAX_HELD_SHARE
            assert num_held <= most, f"{num_held} blocks are held for other engines, {most} at most"

    def _fill(self, transfer: _OpenTransfer, runner: Runner) -> None:
        held = transfer.held
        lasts = held.number in self._scheduler.kv.holds.held  # else it ended with lost steps
        if isinstance(runner, WritableRunner) and lasts and len(held.room) and not transfer.filled:
            start = len(held.cached) * self._scenario.block_size
            runner.fill(held.room, held.tokens[start:], start)
            self._watch.note_filled(held)
            transfer.filled = True

    def _end(self, transfer: _OpenTransfer) -> None:
        self._open.remove(transfer)
        written = transfer.filled and self._rng.random() < 0.8
        self._scheduler.release_prefix(transfer.held.number, written=written)

    def _check_leased(self, runner: Runner) -> None:
        """Other engines read these blocks now."""
        if not isinstance(runner, Readable):
            return
        for held in self._scheduler.kv.holds.held.values():
            tokens = held.tokens[: len(held.cached) * self._scenario.block_size].tolist()
            found = runner.read(Tier.DEVICE, held.cached.tolist())
            assert found == list(zip(tokens, range(len(tokens)), strict=True)), f"leased blocks hold {found}"
