"""Prefixes between engines: leases, copies between steps, and what remains when either side fails."""

import random
from collections import Counter
from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from quire.core.ids import RequestId
from quire.core.moves import Tier
from quire.core.oracle import continuation
from quire.core.request import BlockOwner, Request
from quire.core.sampling import RowSampling
from quire.core.shared_blocks import (
    MAX_LEASES,
    BlockAddress,
    LeaseEnded,
    MemoryRefused,
    PeerBlocks,
    PeerLease,
    SharedBlocks,
)
from quire.engine.prefix_transfer import (
    LEASE_S,
    ImportDone,
    PrefixExports,
    PrefixImports,
    PrefixLease,
    TransferFailed,
    TransferFailure,
)
from quire.kv.manager import KVManager
from quire.sched.audit import audit, audit_rest
from quire.sched.loop import Loop
from quire.sched.scheduler import Scheduler
from quire.sim.runners import OracleRunner

BLOCK, VOCAB = 4, 97
LAYOUT = "oracle"


class Side:
    """A scheduler over the exact oracle: a token that was computed from a wrong block is another one."""

    def __init__(self, num_blocks: int, num_host_blocks: int = 0) -> None:
        kv = KVManager(num_blocks, BLOCK, 4, num_host_blocks=num_host_blocks)
        self.scheduler = Scheduler(kv, max_rows=4, max_step_tokens=12)
        self.runner = OracleRunner(num_blocks, BLOCK, VOCAB, num_host_blocks)
        self.loop = Loop(self.scheduler, self.runner, 0, lambda: 0.0)

    def add(self, number: int, prompt: Sequence[int], max_tokens: int) -> None:
        tokens = np.array(prompt, dtype=np.int32)
        self.scheduler.add(Request(RequestId(number), tokens, max_tokens, RowSampling()))

    def step(self) -> dict[int, list[int]]:
        """The output of requests that ended in this step."""
        output = None if self.scheduler.idle else self.loop.step()
        return {} if output is None else {over.number: over.tokens.tolist() for over in output.finished}


class Prefill(Side):
    """The real words of leases; the blocks are those of the oracle."""

    def __init__(self, num_blocks: int, clock: "Clock") -> None:
        super().__init__(num_blocks)
        self.shared = SharedBlocks(1, 0)
        self.exports = PrefixExports(self.scheduler, self.shared, LAYOUT, lambda: clock.now_s)

    def kill(self) -> None:
        self.shared.close()


class Clock:
    now_s = 0.0


class OracleSource:
    """Blocks of one oracle, copied into those of another: as late as a device may, after some looks at it."""

    def __init__(self, address: BlockAddress, source: OracleRunner, target: OracleRunner, num_looks: int = 0) -> None:
        self._peer = PeerLease(address)
        self._source, self._target, self._num_looks = source, target, num_looks
        self._under_way: list[tuple[int, int]] = []
        self._num_left = 0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert not self._under_way
        self._peer.check()
        self._under_way, self._num_left = list(zip(sources, targets, strict=True)), self._num_looks

    def device_s(self, *, wait: bool) -> float | None:
        if self._num_left and not wait:
            self._num_left -= 1
            return None
        for source, target in self._under_way:
            self._target._device[target] = list(self._source._device[source])
        self._under_way = []
        self._peer.check()
        return 0.5


class Exchange:
    """Requests split over two engines, by a front that follows each of them."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = Clock()
        self.ends: Counter[str] = Counter()
        self.stage: dict[int, str] = {}
        self.prompts: dict[int, list[int]] = {}
        self.leases: dict[int, PrefixLease] = {}
        self.next_number = 0
        self.new_prefill()
        self.new_decode()

    def new_prefill(self) -> None:
        self.prefill = Prefill(self.dice.choice([24, 60]), self.clock)

    def new_decode(self) -> None:
        self.decode = Side(self.dice.choice([16, 60]), self.dice.choice([0, 12]))
        self.imports = PrefixImports(
            self.decode.scheduler,
            LAYOUT,
            lambda address: OracleSource(
                address, self.prefill.runner, self.decode.runner, num_looks=self.dice.choice([0, 1, 3])
            ),
            lambda: self.clock.now_s,
            copy_bytes=self.dice.choice([1, 3]),
        )

    # What happens.

    def arrive(self) -> None:
        number, self.next_number = self.next_number, self.next_number + 1
        start = self.dice.choice([[1, 2, 3] * 6, [5] * 9])
        prompt = [*start, *(self.dice.randrange(VOCAB) for _ in range(self.dice.randint(1, 20)))]
        self.prompts[number], self.stage[number] = prompt, "prefill"
        self.prefill.add(number, prompt[: (len(prompt) - 1) // BLOCK * BLOCK], 1)

    def step_prefill(self) -> None:
        for number in self.prefill.step():
            if self.stage.get(number) == "prefill":
                self.lease(number)

    def lease(self, number: int) -> None:
        prompt = self.prompts[number]
        try:
            self.leases[number] = lease = self.prefill.exports.lease("", prompt[: (len(prompt) - 1) // BLOCK * BLOCK])
            self.imports.begin(number, BlockOwner(RequestId(number), "", 0), prompt, lease)
            self.stage[number] = "import"
        except TransferFailed as failed:
            self.submit(number, failed.reason.value)

    def submit(self, number: int, end: str) -> None:
        """To the decode engine, whatever came of the transfer."""
        self.let_go(number)
        self.ends[end] += 1
        self.stage[number] = "decode"
        self.decode.add(number, self.prompts[number], 6)

    def let_go(self, number: int) -> None:
        lease = self.leases.pop(number, None)
        if lease is not None:
            self.prefill.exports.release(lease.address.slot, lease.address.generation)

    def copy(self) -> None:
        done = self.imports.advance()
        if done is not None and self.stage.get(done.token) == "import":
            self.submit(done.token, "copied" if done.failure is None else done.failure.value)

    def step_decode(self) -> None:
        for number, tokens in self.decode.step().items():
            if self.stage.pop(number, None) is not None:
                prompt = np.array(self.prompts.pop(number), dtype=np.int32)
                assert tokens == list(islice(continuation(prompt, VOCAB), 6)), number
                self.ends["answered"] += 1

    def abort(self) -> None:
        if self.stage:
            number = self.dice.choice(sorted(self.stage))
            stage = self.stage.pop(number)
            del self.prompts[number]
            self.ends[f"aborted {stage}"] += 1
            self.let_go(number)  # a copy that still runs is dropped: its lease has ended
            (self.prefill if stage == "prefill" else self.decode).scheduler.abort(RequestId(number))

    def pass_time(self) -> None:
        self.clock.now_s += self.dice.choice([0.1, LEASE_S])
        self.prefill.exports.expire()

    def kill_prefill(self) -> None:
        self.prefill.kill()
        self.leases.clear()
        self.new_prefill()
        for number in [number for number, stage in self.stage.items() if stage == "prefill"]:
            self.submit(number, TransferFailure.ENGINE_LOST.value)

    def kill_decode(self) -> None:
        """Its clients are told."""
        for number in [number for number, stage in self.stage.items() if stage != "prefill"]:
            self.let_go(number)
            del self.stage[number], self.prompts[number]
        self.new_decode()

    def lose_steps(self) -> None:
        dice = self.dice
        side = dice.choice([self.prefill, self.decode])
        side.scheduler.lose_steps(keep_cache=dice.random() < 0.5)
        self.prefill.exports.expire()
        self.copy()  # as an engine's loop does before its next step: it waits for a copy into blocks that were lost

    def run(self, num_events: int) -> None:
        events = [self.arrive, self.step_prefill, self.step_decode, self.copy, self.abort, self.pass_time,
                  self.kill_prefill, self.kill_decode, self.lose_steps]  # fmt: skip
        weights = [12, 30, 30, 20, 2, 3, 1, 0.3, 0.5]
        for number in range(num_events):
            self.dice.choices(events, weights)[0]()
            if number % 16 == 0:
                self.audit()
        while self.stage:
            self.step_prefill()
            self.copy()
            self.step_decode()
        while not (self.imports.idle and self.prefill.scheduler.idle and self.decode.scheduler.idle):
            self.step_prefill()  # what was aborted
            self.copy()
            self.step_decode()
        assert not len(self.prefill.exports) and not self.prefill.shared.num_leases, "a lease has no reader"
        for side in (self.prefill, self.decode):
            audit_rest(side.scheduler)
        self.prefill.kill()

    def audit(self) -> None:
        audit(self.prefill.scheduler)
        audit(self.decode.scheduler)


def run_exchanges(seeds: range, num_events: int) -> Counter[str]:
    ends: Counter[str] = Counter()
    for seed in seeds:
        exchange = Exchange(seed)
        exchange.run(num_events)
        ends += exchange.ends
    return ends


def test_every_answer_is_that_of_one_engine_and_no_block_is_left() -> None:
    ends = run_exchanges(range(6), 300)
    assert ends["copied"] > 20 and ends["answered"] > 20, ends
    kinds = {TransferFailure.ENGINE_LOST, TransferFailure.LEASE_ENDED, TransferFailure.NO_ROOM}
    assert all(ends[kind.value] for kind in kinds), ends
    assert all(ends[f"aborted {stage}"] for stage in ("prefill", "import", "decode")), ends


@pytest.mark.long
@pytest.mark.parametrize("part", range(5))
def test_ten_thousand_split_requests(part: int) -> None:
    ends = run_exchanges(range(100 + 14 * part, 114 + 14 * part), 1500)
    assert sum(ends[kind] for kind in ("copied", *(each.value for each in TransferFailure))) >= 2000, ends


def test_a_lease_is_of_one_memory_and_one_time() -> None:
    shared = SharedBlocks(3, 8)
    shared.blocks[:] = np.arange(24, dtype=np.uint8).reshape(3, 8)
    address = shared.grant()
    assert address is not None
    targets = np.zeros((4, 8), dtype=np.uint8)
    peer = PeerBlocks(address, targets)
    peer.copy([2, 1], [0, 3])
    assert targets[0].tolist() == list(range(16, 24)) and targets[3].tolist() == list(range(8, 16))
    shared.revoke(address.slot)
    with pytest.raises(LeaseEnded):
        peer.copy([1], [1])
    assert not targets[1].any(), "nothing is read after its lease"
    again = shared.grant()
    assert again is not None and again.slot == address.slot and again.generation != address.generation
    for other in (address, again._replace(epoch=again.epoch + 1), again._replace(descriptor=1 << 20)):
        with pytest.raises(LeaseEnded):
            PeerBlocks(other, targets)
    assert [shared.grant() is None for _ in range(MAX_LEASES)] == [False] * (MAX_LEASES - 1) + [True]
    shared.close()


def test_another_layout_and_a_full_cache_are_refused() -> None:
    clock = Clock()
    prefill, decode = Prefill(40, clock), Side(8)
    prompt = list(range(30))
    prefill.add(0, prompt, 1)
    while not prefill.scheduler.idle:
        prefill.step()
    lease = prefill.exports.lease("", prompt)
    assert lease.num_tokens == 28 and len(lease.blocks) == 7
    owner = BlockOwner(RequestId(0), "", 0)
    for layout, reason in (("other", TransferFailure.LAYOUT), (LAYOUT, TransferFailure.NO_ROOM)):
        imports = PrefixImports(
            decode.scheduler,
            layout,
            lambda address: OracleSource(address, prefill.runner, decode.runner),
            lambda: clock.now_s,
        )
        with pytest.raises(TransferFailed) as failed:
            imports.begin(0, owner, prompt, lease)
        assert failed.value.reason is reason and reason.text in str(failed.value) and imports.idle
    with pytest.raises(TransferFailed):
        prefill.exports.lease("another tenant", prompt)
    clock.now_s = LEASE_S
    prefill.exports.expire()
    audit_rest(prefill.scheduler)
    audit_rest(decode.scheduler)
    prefill.kill()


class Leased:
    """A prompt of seven whole blocks, computed and leased."""

    def __init__(self) -> None:
        self.prompt = list(range(30))
        self.prefill = Prefill(40, Clock())
        self.exports = self.prefill.exports
        self.prefill.add(0, self.prompt, 1)
        while not self.prefill.scheduler.idle:
            self.prefill.step()
        self.lease = self.exports.lease("", self.prompt)

    def reader(self, lease: PrefixLease | None = None) -> PeerBlocks:
        return PeerBlocks((lease or self.lease).address, np.zeros((1, 0), dtype=np.uint8))


def test_a_lease_ends_with_the_blocks_that_a_step_lost() -> None:
    leased = Leased()
    reader = leased.reader()
    leased.prefill.scheduler.lose_steps(keep_cache=False)
    leased.exports.expire()
    assert len(leased.exports) == 0
    with pytest.raises(LeaseEnded):
        reader.check()


def test_a_late_release_does_not_end_the_next_lease_of_its_slot() -> None:
    leased = Leased()
    old = leased.lease.address
    leased.exports.release(old.slot, old.generation)
    following = leased.exports.lease("", leased.prompt)
    assert following.address.slot == old.slot
    leased.exports.release(old.slot, old.generation)
    leased.reader(following).check()


def test_readers_know_of_the_end_of_a_lease_before_its_blocks_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    leased = Leased()
    reader, scheduler, freed = leased.reader(), leased.prefill.scheduler, list[int]()

    def release(number: int, *, written: bool) -> None:
        with pytest.raises(LeaseEnded):
            reader.check()
        freed.append(number)

    monkeypatch.setattr(scheduler, "release_prefix", release)
    leased.exports.release(leased.lease.address.slot, leased.lease.address.generation)
    assert len(freed) == 1


def test_without_a_word_for_a_lease_nothing_stays_held() -> None:
    leased = Leased()
    while leased.prefill.shared.grant() is not None:
        pass
    with pytest.raises(TransferFailed):
        leased.exports.lease("", leased.prompt)
    assert len(leased.prefill.scheduler.kv.holds.held) == 1, "that of the first lease"


def test_nothing_is_copied_into_room_that_was_lost_with_a_step() -> None:
    leased, decode = Leased(), Side(40)
    imports = PrefixImports(
        decode.scheduler,
        LAYOUT,
        lambda address: OracleSource(address, leased.prefill.runner, decode.runner),
        lambda: 0.0,
    )
    imports.begin(3, BlockOwner(RequestId(0), "", 0), leased.prompt, leased.lease)
    before = decode.runner.read(Tier.DEVICE, range(1, 41))
    decode.scheduler.lose_steps(keep_cache=False)
    assert imports.advance() == ImportDone(3, 0, 0, TransferFailure.LEASE_ENDED)
    assert decode.runner.read(Tier.DEVICE, range(1, 41)) == before


def test_room_that_was_lost_is_free_for_rows_only_after_the_copy_into_it() -> None:
    """A device copies while steps go on, also where a step was lost: the next step must find it done."""
    leased, decode = Leased(), Side(40)
    source = OracleSource(leased.lease.address, leased.prefill.runner, decode.runner, num_looks=9)
    imports = PrefixImports(decode.scheduler, LAYOUT, lambda address: source, lambda: 0.0)
    imports.begin(3, BlockOwner(RequestId(0), "", 0), leased.prompt, leased.lease)
    assert imports.advance() is None and source._under_way
    decode.scheduler.lose_steps(keep_cache=False)
    assert imports.advance() == ImportDone(3, 0, 0, TransferFailure.LEASE_ENDED)
    assert not source._under_way and imports.idle
    audit_rest(decode.scheduler)


def test_memory_that_cannot_be_read_is_told_and_nothing_is_held() -> None:
    leased, decode = Leased(), Side(40)

    def refuse(address: BlockAddress) -> OracleSource:
        raise MemoryRefused("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")

    imports = PrefixImports(decode.scheduler, LAYOUT, refuse, lambda: 0.0)
    with pytest.raises(TransferFailed) as failed:
        imports.begin(3, BlockOwner(RequestId(0), "", 0), leased.prompt, leased.lease)
    assert failed.value.reason is TransferFailure.NOT_READABLE and imports.idle
    audit_rest(decode.scheduler)


def test_the_runner_is_told_which_blocks_were_written() -> None:
    leased, decode, told = Leased(), Side(40), list[int]()
    imports = PrefixImports(
        decode.scheduler,
        LAYOUT,
        lambda address: OracleSource(address, leased.prefill.runner, decode.runner),
        lambda: 0.0,
        copy_bytes=1,
        note_imported=lambda blocks: told.extend(blocks.tolist()),
    )
    imports.begin(3, BlockOwner(RequestId(0), "", 0), leased.prompt, leased.lease)
    while (done := imports.advance()) is None:
        pass
    found = decode.runner.read(Tier.DEVICE, told)
    assert done.num_tokens == len(found) > BLOCK and done.copy_s == 0.5 * len(leased.lease.blocks)
    assert found == [(token, at) for at, token in enumerate(leased.prompt[: len(found)])]


def test_a_copy_that_its_lease_did_not_outlast_is_not_used() -> None:
    shared = SharedBlocks(3, 8)
    address = shared.grant()
    assert address is not None

    class Overtaken(np.ndarray):  # type: ignore[type-arg]
        def __getitem__(self, block: object) -> object:
            if shared.num_leases:
                shared.revoke(address.slot)
            return super().__getitem__(block)  # type: ignore[index]

    peer = PeerBlocks(address, np.zeros((4, 8), dtype=np.uint8).view(Overtaken))
    with pytest.raises(LeaseEnded):
        peer.copy([1], [1])


def test_no_prefix_is_held_while_copies_wait_for_a_plan() -> None:
    """They may read blocks that are free by now, and would be given as room."""
    decode = Side(8, num_host_blocks=8)
    decode.add(0, range(24), 1)
    while not decode.scheduler.idle:
        decode.step()
    scheduler, owner = decode.scheduler, BlockOwner(RequestId(1), "", 0)
    other = np.arange(50, 58, dtype=np.int32)
    held = scheduler.hold_prefix(owner, other, with_room=True)
    assert held is not None
    scheduler.release_prefix(held.number, written=False)
    assert scheduler.shrink(4) == 4 and scheduler.kv.has_moves
    assert scheduler.hold_prefix(owner, other, with_room=True) is None
