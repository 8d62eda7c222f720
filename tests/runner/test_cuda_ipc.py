"""Stores of other processes: opened once, copied from under a lease, closed with their process. CUDA itself is in
tests/gpu/test_split_on_cuda.py; here the memory is that of this process, and the other process is a real one."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.core.shared_blocks import BlockAddress, DeviceMemory, LeaseEnded, MemoryRefused, PeerBlocks, SharedBlocks
from quire.engine.block_transport import LOCAL_TRANSPORT, BlockTransport
from quire.engine.build_runner import check_role
from quire.engine.prefix_transfer import EngineRole
from quire.models.interface import KvGeometry
from quire.runner.cuda_ipc import DriverError, PeerStores, export_store
from quire.runner.kv_store import KvStores, new_store
from tests import children

GEOMETRY = KvGeometry(num_layers=2, kv_heads=1, head_dim=4, dtype=torch.float32)
BLOCK_SIZE, NUM_BLOCKS = 4, 5
OWNER = """
import json, sys
from quire.core.shared_blocks import DeviceMemory, SharedBlocks

shared = SharedBlocks(6, int(sys.argv[1]), DeviceMemory("00" * 64, 512, 6))
for line in sys.stdin:  # a lease is granted, or ended
    if line.startswith("grant"):
        address = shared.grant()
        print(json.dumps(address), flush=True)
    else:
        shared.revoke(int(line))
        print(flush=True)
"""


class Owner:
    """Another process: its words of leases are real."""

    def __init__(self, block_bytes: int) -> None:
        command = [sys.executable, "-c", OWNER, str(block_bytes)]
        self.process = children.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()

    def grant(self) -> BlockAddress:
        *words, memory, machine, _, _ = json.loads(self.ask("grant"))
        return BlockAddress(*words, DeviceMemory(*memory), machine)

    def revoke(self, address: BlockAddress) -> None:
        self.ask(str(address.slot))

    def kill(self) -> None:
        children.end(self.process)


class Memory:
    """In place of an opened allocation."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks, self.is_closed = blocks, False

    def close(self) -> None:
        self.is_closed = True


class Reader:
    """A decode engine's stores, and what it opened."""

    def __init__(self) -> None:
        self.own = filled(0)
        self.theirs = filled(100)
        self.opened: list[Memory] = []
        self.failure: Exception | None = None
        self.peers = PeerStores(self.own, self.open)

    def open(self, memory: DeviceMemory, block_bytes: int) -> Memory:
        assert (memory.offset, memory.num_blocks) == (512, NUM_BLOCKS + 1)
        assert block_bytes == GEOMETRY.block_bytes(BLOCK_SIZE)
        if self.failure is not None:
            raise self.failure
        self.opened.append(Memory(self.theirs.raw_blocks))
        return self.opened[-1]

    def values(self) -> list[int]:
        return [int(block.flatten()[-1]) for block in self.own.device]


def filled(first: int) -> KvStores:
    stores = new_store(GEOMETRY, NUM_BLOCKS, BLOCK_SIZE, torch.device("cpu"))
    for block in range(NUM_BLOCKS + 1):
        stores.device[block] = first + block
    return stores


@pytest.fixture
def owner() -> Iterator[Owner]:
    process = Owner(GEOMETRY.block_bytes(BLOCK_SIZE))
    yield process
    process.kill()


def test_a_store_is_opened_once_copied_under_its_lease_and_closed_with_its_process(owner: Owner) -> None:
    reader = Reader()
    first, second = owner.grant(), owner.grant()
    source, other = reader.peers.source(first), reader.peers.source(second)
    assert len(reader.opened) == 1, "one epoch"
    source.copy([5, 2], [1, 4])
    assert source.device_s(wait=False) is not None
    assert reader.values() == [0, 105, 2, 3, 102, 5]
    owner.revoke(first)
    with pytest.raises(LeaseEnded):
        source.copy([1], [2])
    other.copy([3], [3])
    owner.revoke(second)  # while the device copies
    reader.peers.close_ended()
    with pytest.raises(LeaseEnded):
        other.device_s(wait=True)
    third, num_files = reader.peers.source(owner.grant()), len(os.listdir("/proc/self/fd"))
    third.copy([4], [2])
    owner.kill()
    reader.peers.close_ended()
    assert not reader.opened[0].is_closed, "a copy is under way"
    assert third.device_s(wait=True) is not None, "a killed process leaves its memory as it was"
    with pytest.raises(LeaseEnded):
        third.copy([1], [1])
    reader.peers.close_ended()
    assert reader.opened[0].is_closed and reader.peers.num_open == 0
    assert len(os.listdir("/proc/self/fd")) < num_files
    with pytest.raises(LeaseEnded):
        third.copy([1], [1])
    with pytest.raises(LeaseEnded):
        reader.peers.source(second)
    assert reader.values() == [0, 105, 104, 103, 102, 5]


def test_memory_that_cannot_be_opened_is_refused_and_an_ended_process_is_a_lost_lease(owner: Owner) -> None:
    reader = Reader()
    address = owner.grant()
    with pytest.raises(MemoryRefused, match="host"):
        reader.peers.source(address._replace(memory=None))
    with pytest.raises(MemoryRefused, match="GPU"):
        PeerBlocks(address, reader.own.block_bytes)
    num_files = len(os.listdir("/proc/self/fd"))
    reader.failure = DriverError("CUDA_ERROR_PEER_ACCESS_UNSUPPORTED")
    with pytest.raises(MemoryRefused, match="PEER_ACCESS"):
        reader.peers.source(address)
    open_memory = reader.open

    def ends(memory: DeviceMemory, block_bytes: int) -> Memory:
        owner.kill()
        return open_memory(memory, block_bytes)

    reader.peers._open_memory = ends
    with pytest.raises(LeaseEnded):
        reader.peers.source(address)
    assert reader.peers.num_open == 0 and len(os.listdir("/proc/self/fd")) <= num_files


def test_a_store_that_cannot_be_exported_is_refused_with_what_to_change() -> None:
    """Without a GPU there is no driver, or the memory is not the GPU's."""
    with pytest.raises(ConfigError, match="expandable_segments"):
        export_store(filled(0).device)


def test_engines_that_share_a_gpu_must_be_told_how_much_each_may_use() -> None:
    cuda = torch.device("cuda")
    with pytest.raises(ConfigError, match="--kv-cache-memory 20GiB"):
        check_role(EngineRole.DECODE, EngineConfig(), cuda)
    check_role(EngineRole.PREFILL, EngineConfig(kv_cache_memory=1 << 30), cuda)
    check_role(EngineRole.WHOLE, EngineConfig(), cuda)
    with pytest.raises(ConfigError, match="--kv-transport nixl copies the KV caches of CPUs so far"):
        check_role(EngineRole.PREFILL, EngineConfig(kv_cache_memory=1 << 30), cuda, BlockTransport(object()))  # type: ignore[arg-type]
    check_role(EngineRole.PREFILL, EngineConfig(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("config", "device", "transport", "message"),
    [
        (EngineConfig(pipeline_parallel_size=2), "cpu", LOCAL_TRANSPORT, "--pipeline-parallel-size 2 divides these"),
        (EngineConfig(tensor_parallel_size=2, kv_cache_memory=1 << 30), "cuda", LOCAL_TRANSPORT, "or use --device cpu"),
        (EngineConfig(tensor_parallel_size=2), "cpu", BlockTransport(object()), "use --kv-transport memory"),
        (EngineConfig(tensor_parallel_size=2, run_ahead=1), "cpu", LOCAL_TRANSPORT, "--run-ahead 1 leaves no time"),
    ],
)  # fmt: skip
def test_blocks_of_ranks_that_cannot_be_copied_are_refused(
    config: EngineConfig, device: str, transport: BlockTransport, message: str
) -> None:
    for role in (EngineRole.PREFILL, EngineRole.DECODE):
        with pytest.raises(ConfigError, match=message):
            check_role(role, config, torch.device(device), transport)
    check_role(EngineRole.WHOLE, config, torch.device(device), transport)
    check_role(EngineRole.DECODE, EngineConfig(tensor_parallel_size=2), torch.device("cpu"))


def test_words_of_leases_are_all_that_is_shared_where_the_blocks_are_on_a_gpu() -> None:
    shared = SharedBlocks(1 << 40, 1 << 20, DeviceMemory("00" * 64, 0, 1 << 40))
    address = shared.grant()
    assert address is not None and address.block_bytes == 1 << 20 and shared.blocks.size == 0
    shared.close()
