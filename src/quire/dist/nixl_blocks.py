"""KV blocks of engines on other machines, read over the network by NIXL. Does not depend on tensors or requests.

The owner registers its memory with a NIXL agent: the page of lease words, and the blocks behind it
(`core/shared_blocks.py`). A reader adds the owner's agent once for each epoch, and reads leased blocks by their ids. When
they have arrived, it reads the page of words: the owner clears the word of a lease before the blocks can be written
again, so a lease whose word is there then has lasted. No clock is compared.

Blocks are read into a buffer, and copied from there by the thread that wants them. NIXL cannot take a transfer back: one
that is given up, also with its connection, still writes where it was asked to when its owner goes on (seen with an owner
that was stopped). So it keeps its buffer until it has ended, and blocks are written only with what has arrived.

Each side calls its agent from one thread of its own. NIXL's thread polls without a pause; these wait while there is
nothing to do.
"""

import base64
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from quire.core.shared_blocks import (
    HEADER_BYTES,
    BlockAddress,
    ConnectionEnded,
    LeaseEnded,
    MemoryRefused,
    NetworkMemory,
    SharedBlocks,
    check_words,
)

LONGEST_S = 10.0  # of the transfer of one piece: as long as a lease lasts
MAX_PEERS = 64  # connected owners; beyond, the one that was read longest ago is disconnected
MAX_BUFFERS = 4  # one is in use, unless transfers were given up that have not ended
_BUSY_S = 2e-4  # between two looks at transfers
_IDLE_S = 5e-3  # the same without leases, for connections that come and go
_DRAM = "DRAM"
_OWN = "NIXL_INIT_AGENT"  # NIXL's name for the side of the caller
_DONE, _FAILED = "DONE", "ERR"

_log = logging.getLogger(__name__)


class TransferAgent(Protocol):
    """What is used of `nixl_agent`. Handles are its own; any call may raise one of its errors."""

    def register_memory(self, reg_list: Any, mem_type: str) -> Any: ...

    def get_agent_metadata(self) -> bytes: ...

    def get_new_notifs(self) -> Any: ...

    def add_remote_agent(self, metadata: bytes) -> str: ...

    def remove_remote_agent(self, agent: str) -> None: ...

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, mem_type: str) -> Any: ...

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: Any, local_indices: Any, remote_xfer_side: Any, remote_indices: Any
    ) -> Any: ...

    def transfer(self, handle: Any) -> str: ...

    def check_xfer_state(self, handle: Any) -> str: ...

    def release_xfer_handle(self, handle: Any) -> None: ...


def offer_blocks(agent: TransferAgent, shared: SharedBlocks) -> None:
    """Let other machines read these blocks, and the words of their leases."""
    memory = shared.memory
    agent.register_memory([(memory.ctypes.data, len(memory), 0, "")], _DRAM)
    metadata = base64.b64encode(agent.get_agent_metadata()).decode()
    shared.offer(NetworkMemory(metadata, memory.ctypes.data, len(shared.blocks)))


def serve_blocks(agent: TransferAgent, shared: SharedBlocks) -> None:
    """As long as this process lives. Without RDMA, it sends what others read whenever it looks at its connections."""

    def serve() -> None:
        while True:
            try:
                agent.get_new_notifs()
            except Exception as error:  # of a connection
                _log.warning("NIXL: %s: %.300s", type(error).__name__, error)
            time.sleep(_BUSY_S if shared.num_leases else _IDLE_S)

    threading.Thread(target=serve, name="nixl", daemon=True).start()


class _BlockLists(NamedTuple):
    """Handles of NIXL: the page of words, and the blocks, by their ids."""

    words: Any
    blocks: Any  # None: blocks without bytes


class _Peer(NamedTuple):
    """An owner that is connected."""

    name: str
    lists: _BlockLists


class _Buffer:
    """The page of words, and behind it room for blocks."""

    __slots__ = ("blocks", "lists", "words")

    def __init__(self, lists: Callable[[int, int, int, int], _BlockLists], num_blocks: int, block_bytes: int) -> None:
        memory = np.zeros(HEADER_BYTES + num_blocks * block_bytes, dtype=np.uint8)
        self.words = memory[:HEADER_BYTES].view(np.int64)
        self.blocks = memory[HEADER_BYTES:].reshape(num_blocks, block_bytes)
        self.lists = lists(memory.ctypes.data, memory.nbytes, num_blocks, block_bytes)


class _Copy:
    """Some blocks on their way. Written by the thread of the transfers until it has ended."""

    __slots__ = ("address", "buffer", "failure", "handle", "has_ended", "is_wanted", "reads_words", "sources")

    def __init__(self, address: BlockAddress, sources: Sequence[int]) -> None:
        self.address = address
        self.sources = sources
        self.buffer: _Buffer | None = None
        self.handle: Any = None
        self.reads_words = False  # after the blocks
        self.failure: LeaseEnded | None = None
        self.has_ended = False
        self.is_wanted = True


class NixlPeers:
    """The owners that this process reads from, each connected once, and the thread that does so."""

    def __init__(
        self, agent: TransferAgent, targets: NDArray[np.uint8], clock: Callable[[], float], copy_bytes: int
    ) -> None:
        """`targets`: [blocks, bytes]. At most `copy_bytes` are copied at once."""
        self.targets = targets
        self.clock = clock
        self._agent = agent
        self._num_buffered = max(min(copy_bytes // max(targets.shape[1], 1), len(targets)), 1)
        self._peers: OrderedDict[int, _Peer] = OrderedDict()  # by epoch, that which was read longest ago first
        self._buffers: list[_Buffer] = []  # free ones
        self._num_buffers = 0
        self._begun: deque[_Copy] = deque()  # without a buffer yet
        self._under_way: list[_Copy] = []
        self._work = threading.Semaphore(0)
        self._ending = threading.Lock()  # a copy ends, and is given up, in two threads

    def start(self) -> None:
        """Begin the thread of the transfers."""
        threading.Thread(target=self._run, name="nixl", daemon=True).start()

    def source(self, address: BlockAddress) -> "NixlBlocks":
        """What copies leased blocks. Raises `MemoryRefused`."""
        if address.network is None:
            raise MemoryRefused("the prefill engine has no NIXL")
        return NixlBlocks(self, address)

    def begin(self, address: BlockAddress, sources: Sequence[int]) -> _Copy:
        copy = _Copy(address, sources)
        self._begun.append(copy)
        self._work.release()
        return copy

    def write(self, copy: _Copy, targets: Sequence[int]) -> None:
        """What has arrived, into the blocks of this engine. The buffer is free then."""
        assert copy.buffer is not None and copy.has_ended
        for place, target in enumerate(targets if self.targets.size else ()):
            np.copyto(self.targets[target], copy.buffer.blocks[place])
        self._buffers.append(copy.buffer)

    def give_up(self, copy: _Copy) -> None:
        """Nothing will be taken from it. Its buffer is free when it has ended."""
        with self._ending:
            copy.is_wanted = False
            if copy.has_ended and copy.failure is None and copy.buffer is not None:
                self._buffers.append(copy.buffer)

    @property
    def num_connected(self) -> int:
        return len(self._peers)

    # The thread of the transfers. No other one calls the agent.

    def _run(self) -> None:
        while True:
            if not self._under_way and not self._begun:
                self._work.acquire()
            self.turn()
            time.sleep(_BUSY_S)

    def turn(self) -> None:
        """Begin what can begin, and look at what is under way."""
        while self._begun and (buffer := self._free_buffer()) is not None:
            copy = self._begun.popleft()
            if not copy.is_wanted:
                self._buffers.append(buffer)
                continue
            copy.buffer = buffer
            self._under_way.append(copy)
            self._attempt(copy, self._read)
        for copy in self._under_way.copy():
            self._attempt(copy, self._look)

    def _free_buffer(self) -> _Buffer | None:
        if not self._buffers and self._num_buffers < MAX_BUFFERS:
            self._num_buffers += 1
            self._buffers.append(_Buffer(self._own_lists, self._num_buffered, self.targets.shape[1]))
        return self._buffers.pop() if self._buffers else None

    def _own_lists(self, address: int, num_bytes: int, num_blocks: int, block_bytes: int) -> _BlockLists:
        self._agent.register_memory([(address, num_bytes, 0, "")], _DRAM)
        return self._lists(_OWN, address, num_blocks, block_bytes)

    def _attempt(self, copy: _Copy, part: Callable[[_Copy], None]) -> None:
        try:
            part(copy)
        except LeaseEnded as ended:
            self._end(copy, ended)
        except Exception as error:  # NIXL's errors have no common class
            reason = f"{type(error).__name__}: {error}"[:300]
            _log.warning("the connection to a prefill engine has ended: %s", reason)
            self._disconnect(copy.address.epoch)
            self._end(copy, ConnectionEnded(reason))

    def _read(self, copy: _Copy) -> None:
        """Begin to read the blocks, or behind them the words."""
        assert copy.buffer is not None
        own, theirs = copy.buffer.lists, self._peer(copy.address).lists
        copy.reads_words = copy.reads_words or theirs.blocks is None
        if copy.reads_words:
            copy.buffer.words[:] = 0
            self._begin(copy, own.words, [0], theirs.words, [0])
        else:
            self._begin(copy, own.blocks, range(len(copy.sources)), theirs.blocks, copy.sources)

    def _begin(self, copy: _Copy, own: Any, targets: Sequence[int], theirs: Any, sources: Sequence[int]) -> None:
        into, out_of = (np.array(each, dtype=np.int32) for each in (targets, sources))
        copy.handle = self._agent.make_prepped_xfer("READ", own, into, theirs, out_of)
        if self._agent.transfer(copy.handle) == _FAILED:
            raise ConnectionError("the transfer was refused")

    def _look(self, copy: _Copy) -> None:
        if copy.handle is None:
            return
        state = self._agent.check_xfer_state(copy.handle)
        if state == _FAILED:
            raise ConnectionError("the transfer failed")
        if state != _DONE:
            return
        self._release(copy)
        if not copy.reads_words and copy.is_wanted:
            copy.reads_words = True
            self._read(copy)
            return
        assert copy.buffer is not None
        check_words(copy.buffer.words, copy.address)
        self._end(copy, None)

    def _end(self, copy: _Copy, failure: LeaseEnded | None) -> None:
        """A buffer that nothing will be taken from is free again."""
        self._release(copy)
        self._under_way.remove(copy)
        with self._ending:
            copy.failure = failure
            copy.has_ended = True
            if copy.buffer is not None and (failure is not None or not copy.is_wanted):
                self._buffers.append(copy.buffer)

    def _release(self, copy: _Copy) -> None:
        handle, copy.handle = copy.handle, None
        if handle is not None:
            try:
                self._agent.release_xfer_handle(handle)
            except Exception as error:
                _log.warning("NIXL could not release a transfer: %s", error)

    def _peer(self, address: BlockAddress) -> _Peer:
        """Connected, if it is not yet."""
        peer = self._peers.get(address.epoch)
        if peer is None:
            assert address.network is not None
            while len(self._peers) >= MAX_PEERS:
                self._disconnect(next(iter(self._peers)))
            network = address.network
            name = self._agent.add_remote_agent(base64.b64decode(network.metadata))
            lists = self._lists(name, network.address, network.num_blocks, address.block_bytes)
            peer = self._peers[address.epoch] = _Peer(name, lists)
        self._peers.move_to_end(address.epoch)
        return peer

    def _lists(self, name: str, words: int, num_blocks: int, block_bytes: int) -> _BlockLists:
        page = self._agent.prep_xfer_dlist(name, [(words, HEADER_BYTES, 0)], _DRAM)
        if not block_bytes or not num_blocks:
            return _BlockLists(page, None)
        strided = np.array([[words + HEADER_BYTES, block_bytes, 0, block_bytes, num_blocks]], dtype=np.uint64)
        return _BlockLists(page, self._agent.prep_xfer_dlist(name, strided, _DRAM))

    def _disconnect(self, epoch: int) -> None:
        peer = self._peers.pop(epoch, None)
        if peer is not None:
            try:
                self._agent.remove_remote_agent(peer.name)
            except Exception as error:
                _log.warning("NIXL could not disconnect a prefill engine: %s", error)


class NixlBlocks:
    """Leased blocks of an owner on another machine: a `BlockSource`. Its copies are one after the other."""

    __slots__ = ("_address", "_begun_s", "_copy", "_peers", "_targets")

    def __init__(self, peers: NixlPeers, address: BlockAddress) -> None:
        self._peers = peers
        self._address = address
        self._copy: _Copy | None = None
        self._targets: Sequence[int] = ()
        self._begun_s = 0.0

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert self._copy is None, "a copy is under way"
        self._begun_s = self._peers.clock()
        self._targets = targets
        self._copy = self._peers.begin(self._address, sources)

    def device_s(self, *, wait: bool) -> float | None:
        """The seconds until its end was seen, which is between two steps. A copy that must end is given up."""
        copy, seconds = self._copy, self._peers.clock() - self._begun_s
        if copy is None:
            return 0.0
        if not (copy.has_ended or wait or seconds > LONGEST_S):
            return None
        self._copy = None
        if wait or not copy.has_ended:
            self._peers.give_up(copy)
            if not wait:
                raise ConnectionEnded(f"a transfer took more than {LONGEST_S:.0f} s")
            return seconds
        if copy.failure is not None:
            raise copy.failure
        self._peers.write(copy, self._targets)
        return self._peers.clock() - self._begun_s
