"""Moves copy whole blocks between tiers; what a copy costs is measured."""

from itertools import count

import pytest
import torch

from quire.core.errors import ConfigError
from quire.core.shared_blocks import LeaseEnded, PeerBlocks, SharedBlocks, map_part
from quire.models.interface import KvGeometry
from quire.runner.kv_store import KvStores, new_store
from quire.runner.warmup import measure_transfer
from tests.runner.plans import DEVICE, HOST, moves

GEOMETRY = KvGeometry(num_layers=2, kv_heads=1, head_dim=3, dtype=torch.float32)
CPU = torch.device("cpu")


def filled(num_blocks: int = 5, num_host_blocks: int = 3) -> KvStores:
    """Block b of the device holds b, block b of the host -b."""
    stores = new_store(GEOMETRY, num_blocks, 4, CPU, num_host_blocks)
    assert stores.host is not None
    for block in range(num_blocks + 1):
        stores.device[block] = block
    for block in range(num_host_blocks + 1):
        stores.host[block] = -block
    return stores


def values(store: torch.Tensor | None) -> list[float]:
    assert store is not None
    flat = store.flatten(1)
    assert flat.eq(flat[:, :1]).all()
    return flat[:, 0].tolist()


def test_the_stores_have_a_null_block_each_and_the_same_blocks() -> None:
    stores = new_store(GEOMETRY, 5, 4, CPU, 3)
    assert stores.host is not None
    assert (len(stores.device), len(stores.host)) == (6, 4)
    assert stores.device.shape[1:] == stores.host.shape[1:] == (2, 2, 4, 1, 3)
    assert stores.block_size == 4
    assert new_store(GEOMETRY, 5, 4, CPU).host is None


def test_blocks_move_within_and_between_the_tiers() -> None:
    stores = filled()
    stores.carry(moves(DEVICE, DEVICE, (1, 4), (2, 5)))
    assert values(stores.device) == [0, 1, 2, 3, 1, 2]
    stores.carry(moves(DEVICE, HOST, (5, 1), (3, 2)))
    assert values(stores.host) == [0, 2, 3, -3]
    stores.carry(moves(HOST, DEVICE, (3, 1)))
    assert values(stores.device) == [0, -3, 2, 3, 1, 2]


def test_blocks_may_change_places_by_way_of_the_host() -> None:
    stores = filled()
    stores.carry(moves(DEVICE, HOST, (1, 1), (2, 2)) + moves(HOST, DEVICE, (1, 2), (2, 1)))
    assert values(stores.device)[:3] == [0, 2, 1]


def test_a_move_to_a_host_that_has_no_store_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match="no store"):
        new_store(GEOMETRY, 5, 4, CPU).carry(moves(DEVICE, HOST, (1, 1)))


@pytest.mark.parametrize(("num_blocks", "num_host_blocks"), [(2**45, 0), (1, 2**45)])
def test_stores_that_do_not_fit_are_refused_with_the_numbers(num_blocks: int, num_host_blocks: int) -> None:
    with pytest.raises(ConfigError, match=str(2**45)):
        new_store(GEOMETRY, num_blocks, 4, CPU, num_host_blocks)


def test_the_cost_of_a_copy_is_seconds_per_block_and_the_device_keeps_its_own() -> None:
    stores = filled(num_blocks=5, num_host_blocks=3)
    ticks = count(step=16.0)  # seconds between two looks at the clock: out and back of four blocks
    assert measure_transfer(stores, lambda: next(ticks)) == 2.0
    assert values(stores.device) == [0, 1, 2, 3, 4, 5]


def test_blocks_in_shared_memory_are_copied_by_another_store() -> None:
    """What a prefill engine writes and a decode engine reads."""
    shared = SharedBlocks(6, GEOMETRY.block_bytes(4))
    theirs, own = new_store(GEOMETRY, 5, 4, CPU, memory=shared.part(0)), filled()
    for block in range(6):
        theirs.device[block] = 100 + block
    lease = shared.grant()
    assert lease is not None
    PeerBlocks(lease, own.block_bytes).copy([5, 2], [1, 4])
    assert values(own.device) == [0, 105, 2, 3, 102, 5]
    assert values(theirs.device) == [100, 101, 102, 103, 104, 105]
    shared.close()


def test_blocks_of_several_ranks_are_copied_part_by_part() -> None:
    """Each rank maps its part of a memory that rank 0 has allocated; rank 0 copies for all."""
    size = GEOMETRY.block_bytes(4)
    theirs, ours = SharedBlocks(6, size, num_parts=2), SharedBlocks(5, size, num_parts=2)
    filling = [new_store(GEOMETRY, 5, 4, CPU, memory=map_part(theirs.place, rank, 2, size)) for rank in range(2)]
    reading = [new_store(GEOMETRY, 4, 4, CPU, memory=map_part(ours.place, rank, 2, size)) for rank in range(2)]
    for rank, store in enumerate(filling):
        for block in range(6):
            store.device[block] = 100 * (rank + 1) + block
    for store in reading:
        store.device[:] = 0
    lease = theirs.grant()
    assert lease is not None and lease.whole_bytes == 2 * size
    PeerBlocks(lease, ours.blocks).copy([5, 2], [1, 4])
    assert [values(store.device) for store in reading] == [[0, 105, 0, 0, 102], [0, 205, 0, 0, 202]]
    theirs.revoke(lease.slot)
    with pytest.raises(LeaseEnded):
        PeerBlocks(lease, ours.blocks)
    theirs.close()
    ours.close()
