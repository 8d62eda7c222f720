"""Prefixes between engines: a prefill engine leases the blocks of a prompt, a decode engine copies them.

The prefix cache is the exchange. What a prefill engine has computed is in its cache: a lease holds these blocks until
it is released or expires. A decode engine takes free blocks, copies some of them between two steps (on a GPU beside the
steps, which it does not wait for), and puts them into its own cache when all are there and the lease has lasted. The
request then finds its prefix cached. Whatever fails,
nothing is inserted, the blocks are free again, and the request computes its prompt as without another engine.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from quire.core.ids import IntArray, RequestId
from quire.core.request import BlockOwner
from quire.core.shared_blocks import BlockAddress, ConnectionEnded, LeaseEnded, MemoryRefused, SharedBlocks

if TYPE_CHECKING:  # a server imports its messages, and no scheduler
    from quire.kv.prefix_holds import HeldPrefix
    from quire.sched.scheduler import Scheduler

LEASE_S = 10.0  # a decode engine copies within milliseconds, unless a step of its own takes long
COPY_BYTES = 32 << 20  # between two steps: some 10 ms
DEVICE_COPY_BYTES = 256 << 20  # beside a step of a GPU: some 0.2 ms of its memory bandwidth

_log = logging.getLogger(__name__)


class TransferFailure(Enum):
    """Why a prompt is computed by the decode engine after all. Metrics have the values."""

    NO_ENGINE = "no_prefill_engine"
    ENGINE_LOST = "prefill_lost"
    REFUSED = "prefill_refused"
    NOT_CACHED = "not_cached"
    LEASE_ENDED = "lease_ended"
    CONNECTION = "connection_lost"
    LAYOUT = "layout"
    NOT_READABLE = "not_readable"
    NO_ROOM = "no_room"

    @property
    def text(self) -> str:
        return _FAILURE_TEXT[self]


_FAILURE_TEXT = {
    TransferFailure.NO_ENGINE: "no prefill engine was ready",
    TransferFailure.ENGINE_LOST: "the prefill engine ended",
    TransferFailure.REFUSED: "the prefill engine could not compute it",
    TransferFailure.NOT_CACHED: "the prefill engine no longer had it cached, or had too many leases",
    TransferFailure.LEASE_ENDED: "the lease on its blocks ended before they were copied",
    TransferFailure.CONNECTION: "the connection to the prefill engine was lost before its blocks were copied",
    TransferFailure.LAYOUT: "the prefill engine has another layout of blocks",
    TransferFailure.NOT_READABLE: "the memory of the prefill engine could not be read from this engine",
    TransferFailure.NO_ROOM: "this engine had too few free blocks for it",
}


def _failure_of(ended: LeaseEnded) -> TransferFailure:
    return TransferFailure.CONNECTION if isinstance(ended, ConnectionEnded) else TransferFailure.LEASE_ENDED


class EngineRole(Enum):
    """What an engine is for."""

    WHOLE = "whole"
    PREFILL = "prefill"  # computes prompts, and leases their blocks
    DECODE = "decode"  # copies leased blocks


class KvTransport(Enum):
    """How blocks get from one engine to another: what `--kv-transport` chooses."""

    AUTO = "auto"  # memory between engines of one machine, NIXL between machines if it is installed
    MEMORY = "memory"
    NIXL = "nixl"  # between engines of one machine, too


class TransferFailed(Exception):
    """A prefix cannot be leased or copied."""

    def __init__(self, reason: TransferFailure) -> None:
        super().__init__(reason.text)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class PrefixLease:
    """Blocks of a prefill engine, one for each whole block of a prompt's beginning."""

    address: BlockAddress
    layout: str  # what the bytes of a block are; of another layout nothing is copied
    num_tokens: int
    blocks: list[int]


class PrefixExports:
    """The leases of a prefill engine."""

    def __init__(
        self,
        scheduler: "Scheduler",
        shared: SharedBlocks,
        layout: str,
        clock: Callable[[], float],
        settle: Callable[[], None] | None = None,  # wait for the device, where a cached block may be on its way there
    ) -> None:
        self._scheduler = scheduler
        self._shared = shared
        self._layout = layout
        self._clock = clock
        self._settle = settle
        self._leases: dict[int, _Leased] = {}  # by slot, the oldest first

    def lease(self, partition: str, tokens: Sequence[int]) -> PrefixLease:
        """Hold what is cached of some tokens for a time. Raises `TransferFailed`."""
        owner = BlockOwner(RequestId(0), partition, 0)
        held = self._scheduler.hold_prefix(owner, np.array(tokens, dtype=np.int32), with_room=False)
        if held is None:
            raise TransferFailed(TransferFailure.NOT_CACHED)
        address = self._shared.grant()
        if address is None:
            self._scheduler.release_prefix(held.number, written=False)
            raise TransferFailed(TransferFailure.NOT_CACHED)
        if self._settle is not None:
            self._settle()
        self._leases[address.slot] = _Leased(address.generation, held.number, self._clock() + LEASE_S)
        blocks = held.cached.tolist()
        return PrefixLease(address, self._layout, len(blocks) * self._scheduler.kv.block_size, blocks)

    def release(self, slot: int, generation: int) -> None:
        """The blocks are copied, or not wanted. A lease that has ended before is ignored."""
        leased = self._leases.get(slot)
        if leased is not None and leased.generation == generation:
            self._end(slot)

    def expire(self) -> None:
        """End leases whose time is over, and those whose blocks were lost with a step. Call between two steps."""
        now_s, held = self._clock(), self._scheduler.kv.holds.held
        for slot in [s for s, each in self._leases.items() if each.until_s <= now_s or each.hold not in held]:
            self._end(slot)

    def _end(self, slot: int) -> None:
        """First the word that readers check, then the blocks."""
        leased = self._leases.pop(slot)
        self._shared.revoke(slot)
        self._scheduler.release_prefix(leased.hold, written=False)

    def __len__(self) -> int:
        return len(self._leases)


class _Leased(NamedTuple):
    generation: int
    hold: int
    until_s: float


class BlockSource(Protocol):
    """Leased blocks of another engine: in shared memory (`PeerBlocks`), on a GPU (`runner/cuda_ipc.py`), or on another
    machine (`dist/nixl_blocks.py`)."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Begin to copy. Raises `LeaseEnded`: then no copy has begun."""

    def device_s(self, *, wait: bool) -> float | None:
        """The seconds that a device took for what `copy` began, without those of the call; None while it copies, unless
        it is waited for. Raises `LeaseEnded` if the lease did not last until the end."""


class ImportDone(NamedTuple):
    """The end of an import: what was copied, or why nothing was."""

    token: int  # as it was given to `begin`
    num_tokens: int  # copied now; the others of the prefix were cached
    num_bytes: int
    failure: TransferFailure | None = None
    copy_s: float = 0.0


@dataclass(slots=True)
class _Import:
    token: int
    held: "HeldPrefix"
    source: BlockSource
    sources: list[int]  # of the blocks that are missing here
    block_bytes: int
    num_begun: int = field(default=0)
    num_copied: int = field(default=0)
    copy_s: float = field(default=0.0)


class PrefixImports:
    """The prefixes that a decode engine copies, one after the other."""

    def __init__(
        self,
        scheduler: "Scheduler",
        layout: str,
        open_source: Callable[[BlockAddress], BlockSource],
        clock: Callable[[], float],
        copy_bytes: int = COPY_BYTES,
        note_imported: Callable[[IntArray], None] | None = None,  # of blocks that are written
        close_ended: Callable[[], None] | None = None,  # the memory of engines that have ended
    ) -> None:
        self._scheduler = scheduler
        self._layout = layout
        self._open_source = open_source
        self._clock = clock
        self._copy_bytes = copy_bytes
        self._note_imported = note_imported
        self._close_ended = close_ended
        self._open: deque[_Import] = deque()

    def begin(self, token: int, owner: BlockOwner, tokens: Sequence[int], lease: PrefixLease) -> None:
        """Take blocks for what is missing here of a leased prefix. Raises `TransferFailed`: nothing is held."""
        if lease.layout != self._layout:
            raise TransferFailed(TransferFailure.LAYOUT)
        try:
            source = self._open_source(lease.address)
        except LeaseEnded as ended:
            raise TransferFailed(_failure_of(ended)) from ended
        except MemoryRefused as refused:
            _log.error("the memory of a prefill engine cannot be read: %s", refused)
            raise TransferFailed(TransferFailure.NOT_READABLE) from refused
        prefix = np.array(tokens[: lease.num_tokens], dtype=np.int32)
        held = self._scheduler.hold_prefix(owner, prefix, with_room=True)
        if held is None:
            raise TransferFailed(TransferFailure.NO_ROOM)
        sources = lease.blocks[len(held.cached) :]
        self._open.append(_Import(token, held, source, sources, lease.address.whole_bytes))

    @property
    def idle(self) -> bool:
        return not self._open

    def advance(self) -> ImportDone | None:
        """Between two steps: copy some blocks of the oldest import; its end, if it has come."""
        if self._close_ended is not None:
            self._close_ended()
        if not self._open:
            return None
        each = self._open[0]
        alive = each.held.number in self._scheduler.kv.holds.held  # else it was lost with a step
        try:
            if not alive:
                each.source.device_s(wait=True)  # rows get these blocks with the next step
                raise LeaseEnded("the blocks of this engine were lost")
            if self._is_copied(each) and each.num_copied < len(each.sources):
                self._begin_copy(each)
                self._is_copied(each)
        except LeaseEnded as ended:
            return self._end(_failure_of(ended))
        return self._end(None) if each.num_copied == len(each.sources) else None

    def _begin_copy(self, each: _Import) -> None:
        count = max(self._copy_bytes // max(each.block_bytes, 1), 1)
        part = slice(each.num_copied, each.num_copied + count)
        started_s = self._clock()
        each.source.copy(each.sources[part], each.held.room[part].tolist())
        each.copy_s += self._clock() - started_s
        each.num_begun += len(each.sources[part])

    def _is_copied(self, each: _Import) -> bool:
        """Whether all that was begun is copied."""
        if each.num_copied < each.num_begun:
            seconds = each.source.device_s(wait=False)
            if seconds is None:
                return False
            each.copy_s += seconds
            if self._note_imported is not None:
                self._note_imported(each.held.room[each.num_copied : each.num_begun])
            each.num_copied = each.num_begun
        return True

    def _end(self, failure: TransferFailure | None) -> ImportDone:
        each = self._open.popleft()
        self._scheduler.release_prefix(each.held.number, written=failure is None)
        if failure is not None:
            return ImportDone(each.token, 0, 0, failure)
        num_blocks = len(each.sources)
        num_tokens = num_blocks * self._scheduler.kv.block_size
        return ImportDone(each.token, num_tokens, num_blocks * each.block_bytes, copy_s=each.copy_s)
