"""KV blocks in memory that other processes of this machine can map, and leases on them. Does not depend on tensors.

One process owns the memory: an anonymous file (`memfd_create`), which ends with the last process that has it mapped. It
begins with a page of words: the epoch, a random number of this memory, and one word for each lease, which holds the
lease's generation while it lasts, and 0 otherwise. No generation comes twice. The blocks follow, unless they are in the
memory of a GPU: then the address of a lease says where (`runner/cuda_ipc.py`). Other machines read words and blocks
over the network (`dist/nixl_blocks.py`).

The ranks of a divided model have one memory: after the page of words the blocks of rank 0, then those of rank 1, and so
on. A rank maps it and writes its part; the leases are rank 0's, whose plans say when a block is written again.

The owner sets the word of a lease to 0 before the leased blocks can be written again. So a reader that finds its
generation after a copy has copied what was leased; a copy that was overtaken by the end of its lease is dropped. No
clock is compared, and an owner that was killed writes nothing more.
"""

import mmap
import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MAX_LEASES = 256
HEADER_BYTES = 4096  # a page, so that the blocks begin at one
_FIRST_LEASE = 1  # word 0 is the epoch


def machine_name() -> str:
    """The same in all processes that find each other by their ids: those of one boot and one process namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not on Linux
        return ""


class DeviceMemory(NamedTuple):
    """Blocks of a GPU that other processes can open."""

    handle: str  # of the allocation: CUDA IPC's 64 bytes in hexadecimal
    offset: int  # of the first block in it, in bytes
    num_blocks: int


class NetworkMemory(NamedTuple):
    """The same memory as other machines read it."""

    metadata: str  # of the owner's NIXL agent, in base64
    address: int  # of the page of words in the owner's process; the blocks follow
    num_blocks: int


class BlockAddress(NamedTuple):
    """Where the blocks of another process are, and the lease on some of them."""

    pid: int
    descriptor: int
    epoch: int
    slot: int
    generation: int
    block_bytes: int
    memory: DeviceMemory | None = None  # None: in the file
    machine: str = ""  # whose processes can map the file
    network: NetworkMemory | None = None  # None: not for other machines
    num_parts: int = 1  # of each block, one behind the other: a part has `block_bytes`

    @property
    def whole_bytes(self) -> int:
        """Of a block, in all its parts."""
        return self.block_bytes * self.num_parts


class LeaseEnded(Exception):
    """The memory, or the lease on it, is gone: nothing that was copied may be used."""


class ConnectionEnded(LeaseEnded):
    """The same, because the owner could not be reached until the end of a copy."""


class MemoryRefused(Exception):
    """The memory of another process cannot be read from this one."""


class SharedBlocks:
    """The owner's side. Block 0 is the first."""

    __slots__ = (
        *("_descriptor", "_device", "_free", "_machine", "_memory", "_network", "_next_generation"),
        *("_words", "block_bytes", "blocks", "epoch", "num_parts"),
    )

    def __init__(
        self, num_blocks: int, block_bytes: int, device: DeviceMemory | None = None, num_parts: int = 1
    ) -> None:
        """`device`: where the blocks are, if not in this memory. `num_parts`: ranks that each have this memory."""
        self.block_bytes, self.num_parts = block_bytes, num_parts
        self._network: NetworkMemory | None = None
        self._device = device
        self._machine = machine_name()
        num_blocks = num_blocks * num_parts if device is None else 0
        self._descriptor = os.memfd_create("quire-kv", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, HEADER_BYTES + num_blocks * block_bytes)
        self._memory = mmap.mmap(self._descriptor, 0)
        self._words: NDArray[np.int64] = np.frombuffer(self._memory, np.int64, _FIRST_LEASE + MAX_LEASES)
        self.epoch = self._words[0] = secrets.randbits(62) | 1
        self.blocks: NDArray[np.uint8] = np.frombuffer(
            self._memory, np.uint8, num_blocks * block_bytes, HEADER_BYTES
        ).reshape(num_blocks, block_bytes)
        self._free = list(range(MAX_LEASES - 1, -1, -1))
        self._next_generation = 1

    def offer(self, network: NetworkMemory) -> None:
        """From now on the address of a lease says where other machines read it."""
        self._network = network

    def grant(self) -> BlockAddress | None:
        """Begin a lease; None if there are too many. The caller keeps the leased blocks as they are until `revoke`."""
        if not self._free:
            return None
        slot, generation = self._free.pop(), self._next_generation
        self._next_generation += 1
        self._words[_FIRST_LEASE + slot] = generation
        where = (self.block_bytes, self._device, self._machine, self._network, self.num_parts)
        return BlockAddress(os.getpid(), self._descriptor, int(self.epoch), slot, generation, *where)

    @property
    def place(self) -> tuple[int, int]:
        """The process and the descriptor by which another process of this machine finds the memory."""
        return os.getpid(), self._descriptor

    def part(self, number: int) -> NDArray[np.uint8]:
        """The blocks of one rank: [blocks, bytes]."""
        return _part(self.blocks, number, self.num_parts)

    def revoke(self, slot: int) -> None:
        """End a lease. From now on no reader uses what it copies."""
        assert self._words[_FIRST_LEASE + slot], f"lease {slot} has ended"
        self._words[_FIRST_LEASE + slot] = 0
        self._free.append(slot)

    @property
    def num_leases(self) -> int:
        return MAX_LEASES - len(self._free)

    @property
    def memory(self) -> NDArray[np.uint8]:
        """All of it: the page of words, and the blocks."""
        return np.frombuffer(self._memory, np.uint8)

    def close(self) -> None:
        """Give the memory back, as far as no other process and no array has it."""
        os.close(self._descriptor)


def map_part(place: tuple[int, int], number: int, num_parts: int, block_bytes: int) -> NDArray[np.uint8]:
    """The blocks of one rank, in its own process, to be written: [blocks, bytes]. Raises OSError."""
    pid, descriptor = place
    with open(f"/proc/{pid}/fd/{descriptor}", "r+b") as file:
        memory = mmap.mmap(file.fileno(), 0)
    blocks: NDArray[np.uint8] = np.frombuffer(memory, np.uint8, offset=HEADER_BYTES).reshape(-1, block_bytes)
    return _part(blocks, number, num_parts)


def _part(blocks: NDArray[np.uint8], number: int, num_parts: int) -> NDArray[np.uint8]:
    length = len(blocks) // num_parts
    return blocks[number * length : (number + 1) * length]


def check_words(words: NDArray[np.int64], address: BlockAddress) -> None:
    """Raise `LeaseEnded` unless a lease lasts, by the words of its owner."""
    if words[0] != address.epoch or words[_FIRST_LEASE + address.slot] != address.generation:
        raise LeaseEnded("the lease has ended")


class PeerLease:
    """A reader's side: whether a lease of another process lasts."""

    __slots__ = ("_address", "_memory", "_words")

    def __init__(self, address: BlockAddress) -> None:
        """Raises `LeaseEnded` if the process is gone or has other memory by now."""
        self._address = address
        try:
            descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise LeaseEnded(f"process {address.pid} is gone") from error
        try:
            self._memory = memory = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        except (OSError, ValueError) as error:  # not the file of a `SharedBlocks`
            raise LeaseEnded(f"process {address.pid} shares no memory") from error
        finally:
            os.close(descriptor)
        if len(memory) < HEADER_BYTES:
            raise LeaseEnded(f"process {address.pid} shares other memory")
        self._words: NDArray[np.int64] = np.frombuffer(memory, np.int64, _FIRST_LEASE + MAX_LEASES)
        self.check()

    def check(self) -> None:
        """Raise `LeaseEnded` unless the lease lasts."""
        check_words(self._words, self._address)


class PeerBlocks(PeerLease):
    """Copies leased blocks of another process into blocks of this one. A copy is complete when `copy` returns."""

    __slots__ = ("_blocks", "_targets")

    def __init__(self, address: BlockAddress, targets: NDArray[np.uint8]) -> None:
        """`targets`: [blocks, bytes], those of all parts of the memory."""
        super().__init__(address)
        if address.memory is not None:
            raise MemoryRefused("the blocks are in the memory of a GPU")
        self._targets = targets
        size = address.block_bytes
        num_blocks = (len(self._memory) - HEADER_BYTES) // size if size else 0
        blocks: NDArray[np.uint8] = np.frombuffer(self._memory, np.uint8, num_blocks * size, HEADER_BYTES)
        self._blocks = blocks.reshape(num_blocks, size)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy blocks. Raises `LeaseEnded` if the lease did not last until they were copied."""
        self.check()
        if self._address.block_bytes:
            for number in range(self._address.num_parts):
                theirs, ours = (_part(each, number, self._address.num_parts) for each in (self._blocks, self._targets))
                for source, target in zip(sources, targets, strict=True):
                    np.copyto(ours[target], theirs[source])
        self.check()

    def device_s(self, *, wait: bool) -> float | None:
        """No device copies."""
        return 0.0
