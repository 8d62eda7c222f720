"""Blocks over the network: what is copied, when a lease has lasted, and what is left after a failure."""

import time

import numpy as np
import pytest

from quire.core.ids import RequestId
from quire.core.request import BlockOwner
from quire.core.shared_blocks import (
    BlockAddress,
    ConnectionEnded,
    LeaseEnded,
    MemoryRefused,
    PeerBlocks,
    SharedBlocks,
)
from quire.dist.nixl_blocks import LONGEST_S, MAX_BUFFERS, MAX_PEERS, NixlBlocks, NixlPeers, offer_blocks
from quire.engine.block_transport import BlockTransport
from quire.engine.prefix_transfer import ImportDone, PrefixImports, TransferFailure
from quire.sched.audit import audit_rest
from tests.dist.simulated_network import Network, SimulatedAgent
from tests.engine.test_prefix_transfer import LAYOUT, Clock, Leased, Side

BLOCKS, SIZE = 5, 64


class Exchange:
    """An owner of blocks, and a reader on another machine, whose thread makes its turns when it is told to."""

    def __init__(self) -> None:
        self.network, self.clock = Network(), Clock()
        self.shared = SharedBlocks(BLOCKS, SIZE)
        self.shared.blocks[:] = np.arange(BLOCKS, dtype=np.uint8)[:, None] + 1
        offer_blocks(SimulatedAgent("owner", self.network), self.shared)
        self.targets = np.zeros((BLOCKS, SIZE), dtype=np.uint8)
        self.agent = SimulatedAgent("reader", self.network)
        self.peers = NixlPeers(self.agent, self.targets, lambda: self.clock.now_s, 2 * SIZE)

    def lease(self) -> BlockAddress:
        address = self.shared.grant()
        assert address is not None
        return address

    def begin(self, address: BlockAddress, sources: list[int], targets: list[int]) -> NixlBlocks:
        """A copy, after the first turn of the thread."""
        source = self.peers.source(address)
        source.copy(sources, targets)
        self.peers.turn()
        return source

    def copied_s(self, source: NixlBlocks) -> float:
        """Turns until the copy has ended; the seconds that it says."""
        for _ in range(100):
            seconds = source.device_s(wait=False)
            if seconds is not None:
                return seconds
            self.peers.turn()
        raise AssertionError("it does not end")

    def found(self) -> list[int]:
        """What each block holds; 0: nothing."""
        assert (self.targets == self.targets[:, :1]).all()
        return [int(each) for each in self.targets[:, 0]]


def test_blocks_are_copied_by_their_ids_and_the_lease_is_looked_at_behind_them() -> None:
    exchange = Exchange()
    exchange.network.num_looks = 3
    source = exchange.peers.source(exchange.lease())
    assert source.device_s(wait=False) == 0.0, "nothing was begun"
    source.copy([4, 1], [0, 3])
    assert source.device_s(wait=False) is None
    exchange.clock.now_s = 0.25
    assert exchange.copied_s(source) == 0.25
    assert exchange.found() == [5, 0, 0, 2, 0]
    source.copy([2], [1])  # another piece of the same lease
    exchange.copied_s(source)
    assert exchange.found() == [5, 3, 0, 2, 0]
    assert not exchange.agent.under_way and exchange.network.connections["owner"] == 1


@pytest.mark.parametrize("num_looks", [0, 1, 2])
def test_a_lease_that_ends_before_its_words_are_read_has_not_lasted(num_looks: int) -> None:
    exchange = Exchange()
    exchange.network.num_looks = num_looks
    address = exchange.lease()
    source = exchange.peers.source(address)
    source.copy([1], [1])
    if num_looks:
        exchange.peers.turn()
        assert source.device_s(wait=False) is None
    exchange.shared.revoke(address.slot)
    with pytest.raises(LeaseEnded) as ended:
        exchange.copied_s(source)
    assert not isinstance(ended.value, ConnectionEnded) and exchange.peers.num_connected == 1
    assert exchange.found() == [0] * BLOCKS, "nothing of it is written"
    following = exchange.lease()
    assert following.slot == address.slot, "another lease with the same word"
    exchange.copied_s(exchange.begin(following, [1], [1]))
    assert exchange.found()[1] == 2


def test_words_of_another_epoch_are_those_of_another_memory() -> None:
    exchange = Exchange()
    source = exchange.begin(exchange.lease()._replace(epoch=3), [1], [1])
    with pytest.raises(LeaseEnded):
        exchange.copied_s(source)


def test_an_owner_that_dies_is_seen_and_read_again_when_it_is_back() -> None:
    exchange = Exchange()
    address = exchange.lease()
    exchange.network.num_looks = 1
    source = exchange.begin(address, [1], [1])
    exchange.network.dead.add("owner")
    for message in ("NIXL_ERR_REMOTE_DISCONNECT", "NIXL_ERR_BACKEND"):  # it is lost, and cannot be added again
        with pytest.raises(ConnectionEnded, match=message):
            exchange.copied_s(source)
        assert exchange.peers.num_connected == 0 and not exchange.agent.under_way
        source.copy([1], [1])
    with pytest.raises(ConnectionEnded):
        exchange.copied_s(source)
    exchange.network.dead.clear()
    exchange.copied_s(exchange.begin(address, [1], [1]))
    assert exchange.found()[1] == 2 and exchange.network.connections["owner"] == 2


@pytest.mark.parametrize("wait", [False, True])
def test_a_copy_that_is_given_up_writes_nothing_and_keeps_its_buffer_until_it_has_ended(wait: bool) -> None:
    """NIXL's transfers go on, whatever becomes of them here."""
    exchange = Exchange()
    address = exchange.lease()
    exchange.network.num_looks = 10
    for _ in range(MAX_BUFFERS):
        source = exchange.begin(address, [1], [1])
        assert source.device_s(wait=False) is None
        if wait:
            source.device_s(wait=True)
        else:
            exchange.clock.now_s += LONGEST_S + 1
            with pytest.raises(ConnectionEnded, match="more than 10 s"):
                source.device_s(wait=False)
        assert source.device_s(wait=False) == 0.0, "nothing is under way here any more"
    waiting = exchange.begin(address, [2], [2])
    assert len(exchange.agent.under_way) == MAX_BUFFERS, "without a buffer it waits"
    exchange.network.num_looks = 0
    exchange.copied_s(waiting)
    for _ in range(12):
        exchange.peers.turn()
    assert exchange.found() == [0, 0, 3, 0, 0] and not exchange.agent.under_way


def test_a_copy_that_is_given_up_before_it_began_does_not_begin() -> None:
    exchange = Exchange()
    source = exchange.peers.source(exchange.lease())
    source.copy([1], [1])
    source.device_s(wait=True)
    exchange.peers.turn()
    assert not exchange.agent.under_way and exchange.peers.num_connected == 0


def test_a_copy_that_has_ended_before_it_is_given_up_gives_its_buffer_back() -> None:
    exchange = Exchange()
    address = exchange.lease()
    for _ in range(2 * MAX_BUFFERS):
        source = exchange.begin(address, [1], [1])
        for _ in range(3):
            exchange.peers.turn()
        source.device_s(wait=True)
    exchange.copied_s(exchange.begin(address, [2], [2]))
    assert exchange.found() == [0, 0, 3, 0, 0]


def test_blocks_without_bytes_have_leases_all_the_same() -> None:
    exchange = Exchange()
    shared = SharedBlocks(1, 0)
    offer_blocks(SimulatedAgent("script", exchange.network), shared)
    exchange.peers = NixlPeers(exchange.agent, np.zeros((1, 0), dtype=np.uint8), lambda: 0.0, 1 << 20)
    address = shared.grant()
    assert address is not None
    source = exchange.begin(address, [7, 8], [0, 0])
    exchange.copied_s(source)
    shared.revoke(address.slot)
    source.copy([7], [0])
    with pytest.raises(LeaseEnded):
        exchange.copied_s(source)


def test_the_owner_that_was_read_longest_ago_makes_room_for_another() -> None:
    exchange = Exchange()
    owners = [SharedBlocks(BLOCKS, SIZE) for _ in range(MAX_PEERS + 1)]
    for number, shared in enumerate(owners):
        offer_blocks(SimulatedAgent(f"owner {number}", exchange.network), shared)
        address = shared.grant()
        assert address is not None
        first = address if number == 0 else first
        exchange.copied_s(exchange.begin(address, [1], [1]))
        exchange.copied_s(exchange.begin(first, [1], [1]))
    assert exchange.peers.num_connected == MAX_PEERS
    assert exchange.network.connections["owner 0"] == 1, "it was always the latest"


def test_engines_of_one_machine_share_memory_unless_they_are_told_not_to() -> None:
    exchange = Exchange()
    address = exchange.lease()
    far = address._replace(machine="another")

    def opened(transport: BlockTransport, of: BlockAddress) -> type:
        return type(transport.reader(exchange.targets, lambda: 0.0)(of))

    assert opened(BlockTransport(), address) is PeerBlocks
    assert opened(BlockTransport(exchange.agent), address) is PeerBlocks
    assert opened(BlockTransport(exchange.agent), far) is NixlBlocks
    assert opened(BlockTransport(exchange.agent, local=False), address) is NixlBlocks
    with pytest.raises(MemoryRefused, match=r"quire\[nixl\]"):
        opened(BlockTransport(), far)
    with pytest.raises(MemoryRefused, match="has no NIXL"):
        opened(BlockTransport(exchange.agent), far._replace(network=None))


def test_the_thread_of_the_transfers_copies_and_the_owner_serves() -> None:
    exchange = Exchange()
    transport = BlockTransport(exchange.agent, local=False)
    shared = SharedBlocks(BLOCKS, SIZE)
    shared.blocks[:] = 9
    BlockTransport(SimulatedAgent("served", exchange.network)).offer(shared)
    address = shared.grant()
    assert address is not None
    source = transport.reader(exchange.targets, lambda: 0.0)(address)
    source.copy([3, 4], [0, 1])
    while source.device_s(wait=False) is None:
        time.sleep(1e-3)
    assert exchange.found() == [9, 9, 0, 0, 0]


def test_the_reason_of_an_import_is_the_connection() -> None:
    leased, decode, exchange = Leased(), Side(40), Exchange()
    imports = PrefixImports(decode.scheduler, LAYOUT, exchange.peers.source, lambda: 0.0)
    offer_blocks(SimulatedAgent("owner", exchange.network), leased.prefill.shared)
    lease = leased.exports.lease("", leased.prompt)
    imports.begin(3, BlockOwner(RequestId(0), "", 0), leased.prompt, lease)
    exchange.network.dead.add("owner")
    assert imports.advance() is None
    exchange.peers.turn()
    assert imports.advance() == ImportDone(3, 0, 0, TransferFailure.CONNECTION)
    audit_rest(decode.scheduler)
