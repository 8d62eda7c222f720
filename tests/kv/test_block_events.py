"""Replaying the events of the prefix tree gives exactly the whole blocks that it holds on the device, at every step."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import IntArray, RequestId, Row
from quire.core.moves import Tier
from quire.core.request import BlockOwner
from quire.kv.block_events import AllBlocksCleared, BlockEventLog, BlockRemoved, BlockStored
from quire.kv.manager import KVManager, count_blocks
from quire.kv.radix_node import decode

ROWS = 4
Prefix = tuple[int, ...]


def ids(tokens: Prefix | list[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)


class Router:
    """What a subscriber knows: by hash, the hash before and the tokens of the block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.blocks: dict[int, tuple[int | None, Prefix]] = {}
        self.seen: set[type] = set()

    def apply(self, log: BlockEventLog) -> None:
        for event in log.take():
            self.seen.add(type(event))
            match event:
                case BlockStored(hashes, before):
                    assert before is None or before in self.blocks, "a block is told after the one before it"
                    for place, number in enumerate(hashes):
                        assert number not in self.blocks, "and once"
                        tokens = event.token_ids[place * self.block_size : (place + 1) * self.block_size]
                        self.blocks[number] = (before, tuple(tokens))
                        before = number
                case BlockRemoved(hashes):
                    for number in hashes:
                        del self.blocks[number]
                case AllBlocksCleared():
                    self.blocks.clear()

    def prefix(self, number: int) -> Prefix:
        before, tokens = self.blocks[number]
        return tokens if before is None else (*self.prefix(before), *tokens)


class History:
    """Random requests over a manager: prompts that go on from earlier ones, forks, aborts, resets."""

    def __init__(self, seed: int, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
        self.random = random.Random(seed)
        self.size = block_size
        self.kv = KVManager(num_blocks, block_size, ROWS, num_host_blocks=num_host_blocks)
        assert self.kv.tree is not None
        self.tree = self.kv.tree
        self.log = self.tree.events = BlockEventLog(block_size)
        self.router = Router(block_size)
        self.open: dict[Row, tuple[BlockOwner, list[int]]] = {}
        self.prompts: list[tuple[str, list[int]]] = []
        self.num_requests = self.num_demoted = 0

    def step(self) -> None:
        kind = self.random.choices(("open", "decode", "fork", "close", "discard", "reset"), (6, 8, 1, 5, 1, 0.2))[0]
        if kind == "open":
            self.begin()
        elif kind == "reset":
            self.kv.reset_cache()
        elif self.open:
            row = self.random.choice(sorted(self.open))
            owner, tokens = self.open[row]
            if kind == "decode":
                self.write(row, self.random.randint(1, 2 * self.size))
            elif kind == "fork":
                self.fork(row, owner, tokens)
            else:
                del self.open[row]
                self.prompts.append((owner.partition, tokens))
                if kind == "close":
                    self.kv.close(row, owner, ids(tokens))
                else:
                    self.kv.discard(row, owner)
        self.num_demoted += sum(move.dst.tier is Tier.HOST for move in self.kv.take_moves())

    def begin(self) -> None:
        partition = self.random.choice(("", "", "3:abc", "0:salt"))
        tokens = [self.random.randint(0, 1) for _ in range(self.random.randint(1, 3 * self.size))]
        known = [earlier for own, earlier in self.prompts[-20:] if own == partition]
        if known and self.random.random() < 0.7:
            tokens = self.random.choice(known)[: self.random.randint(1, 8 * self.size)] + tokens
        rows = set(range(ROWS)) - self.open.keys()
        self.num_requests += 1
        owner = BlockOwner(RequestId(self.num_requests), partition, 0)
        match = self.kv.match(owner, ids(tokens), len(tokens) - 1)
        num_held = 0 if match is None else len(match.blocks)
        num_more = count_blocks(len(tokens), self.size) - num_held
        if not rows or not self.kv.fits(match, num_more):
            return
        row = Row(min(rows))
        self.kv.open(row, owner, match, num_more)
        self.kv.grow_to(row, len(tokens), owner.request)
        self.kv.commit(row, owner, ids(tokens))
        self.open[row] = owner, tokens

    def write(self, row: Row, count: int) -> None:
        owner, tokens = self.open[row]
        for _ in range(count):
            if len(tokens) % self.size == 0 and not self.kv.grow(row, owner.request):
                return
            tokens.append(self.random.randint(0, 1))
            self.kv.commit(row, owner, ids(tokens))

    def fork(self, row: Row, owner: BlockOwner, tokens: list[int]) -> None:
        rows = set(range(ROWS)) - self.open.keys()
        if rows and self.kv.num_available:
            child = Row(min(rows))
            if len(tokens) % self.size:
                self.kv.reserve(child, 1)
            self.kv.fork(row, child, owner, ids(tokens))
            self.open[child] = owner, list(tokens)

    def held(self) -> list[Prefix]:
        """The whole blocks of the device, each as the prefix that ends with it, of all partitions."""
        found: list[Prefix] = []
        for node in self.tree.nodes():
            if node.tier is Tier.DEVICE:
                path = decode(node.path())
                start = len(path) - len(decode(node.tokens))
                found += [path[:stop] for stop in range(start + self.size, len(path) + 1, self.size)]
        return found

    def check(self) -> None:
        self.router.apply(self.log)
        assert sorted(map(self.router.prefix, self.router.blocks)) == sorted(self.held())


@given(st.integers(0, 2**32), st.integers(6, 40), st.integers(1, 4), st.sampled_from((0, 4, 20)))
def test_events_tell_what_the_tree_holds(seed: int, num_blocks: int, block_size: int, num_host_blocks: int) -> None:
    history = History(seed, num_blocks, block_size, num_host_blocks)
    for _ in range(40):
        history.step()
        history.check()


@pytest.mark.parametrize("seed", range(3))
def test_a_long_history_has_all_kinds_of_events(seed: int) -> None:
    history = History(seed, 20, 2, 10)
    for _ in range(400):
        history.step()
        history.check()
    assert history.router.seen == {BlockStored, BlockRemoved, AllBlocksCleared}
    assert history.tree.num_evicted > 50 and history.num_demoted > 20
    history.kv.audit()
    for row, (owner, tokens) in history.open.items():
        history.kv.close(row, owner, ids(tokens))
    history.kv.reset_cache()
    history.check()
    assert not history.router.blocks
