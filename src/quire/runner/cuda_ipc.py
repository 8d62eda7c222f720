"""KV blocks of other processes on the GPUs of this machine (CUDA IPC). Does not depend on requests or tokens.

The owner exports the allocation that has its KV store, once. A reader opens it once for each epoch of the owner, and
copies leased blocks into its own store by one kernel on a stream of its own: steps go on meanwhile, and the host waits
for an event of this copy alone, not for the device. The lease is checked before a copy begins and after it has ended on
the device. The words of leases are in memory of the host (`core/shared_blocks.py`).

An allocation lives as long as any process has it open. So a reader closes that of an owner that has ended: the owner
that is started instead needs the memory.
"""

import ctypes
import logging
import os
import select
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.shared_blocks import BlockAddress, DeviceMemory, LeaseEnded, MemoryRefused, PeerLease
from quire.runner.kv_store import KvStores

_log = logging.getLogger(__name__)

_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS: memory of another GPU, where the GPUs allow it
_DEVICE_ORDINAL = 9  # CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL


class DriverError(Exception):
    """A call of the CUDA driver failed."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


@cache
def _driver() -> ctypes.CDLL:
    """The driver's own library: the same for every torch, and of every build of torch."""
    driver = ctypes.CDLL("libcuda.so.1")
    driver.cuIpcOpenMemHandle_v2.argtypes = (ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint)
    return driver


def _call(name: str, *args: object) -> None:
    driver = _driver()
    result = driver[name](*args)
    if result:
        text = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(text))
        raise DriverError(f"{name}: {(text.value or b'error').decode()} ({result})")


def export_store(store: Tensor) -> DeviceMemory:
    """Let other processes open the allocation that has this store. Raises `ConfigError`."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    address = store.data_ptr()
    try:
        _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        _call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base.value))
    except (DriverError, OSError) as error:
        raise ConfigError(
            f"--prefill-engines shares the KV cache by CUDA IPC, which failed ({error}). If PYTORCH_CUDA_ALLOC_CONF or "
            f"PYTORCH_ALLOC_CONF chooses expandable_segments or cudaMallocAsync, unset it.",
            param="prefill_engines",
        ) from error
    return DeviceMemory(bytes(handle.reserved).hex(), address - base.value, len(store))


class OpenedMemory(Protocol):
    """The blocks of another process, as a tensor of this one."""

    blocks: Tensor  # [blocks, bytes] uint8

    def close(self) -> None: ...


class CudaMemory:
    """An allocation of another process."""

    def __init__(self, memory: DeviceMemory, block_bytes: int) -> None:
        """Raises `DriverError`. The CUDA context of torch must be current: any operation on the device has done it."""
        handle = _Handle.from_buffer_copy(bytes.fromhex(memory.handle))
        self._base, ordinal = ctypes.c_uint64(), ctypes.c_int()
        _call("cuIpcOpenMemHandle_v2", ctypes.byref(self._base), handle, ctypes.c_uint(_LAZY_PEER_ACCESS))
        _call("cuPointerGetAttribute", ctypes.byref(ordinal), ctypes.c_int(_DEVICE_ORDINAL), self._base)
        array = _CudaArray(self._base.value + memory.offset, memory.num_blocks, block_bytes)
        self.blocks = torch.as_tensor(array, device=torch.device("cuda", ordinal.value))
        assert self.blocks.data_ptr() == self._base.value + memory.offset, "torch has copied it"

    def close(self) -> None:
        del self.blocks
        _call("cuIpcCloseMemHandle", self._base)


class _CudaArray:
    """A pointer as torch takes it."""

    def __init__(self, address: int, num_blocks: int, block_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "data": (address, False),
            "shape": (num_blocks, block_bytes),
            "typestr": "|u1",
            "strides": None,
            "version": 3,
        }


class PeerStore:
    """The KV store of another process, from its first lease to its end."""

    __slots__ = ("_opened", "_process", "is_busy")

    def __init__(self, address: BlockAddress, open_memory: Callable[[DeviceMemory, int], OpenedMemory]) -> None:
        assert address.memory is not None, address
        try:
            self._process = os.pidfd_open(address.pid)
        except OSError as error:
            raise LeaseEnded(f"process {address.pid} is gone") from error
        try:
            self._opened: OpenedMemory | None = open_memory(address.memory, address.block_bytes)
        except (DriverError, OSError) as error:
            has_ended = self.has_ended
            os.close(self._process)
            if has_ended:
                raise LeaseEnded(f"process {address.pid} is gone") from error
            raise MemoryRefused(str(error)) from error
        self.is_busy = False  # a copy is under way

    @property
    def has_ended(self) -> bool:
        poll = select.poll()
        poll.register(self._process, select.POLLIN)
        return bool(poll.poll(0))

    @property
    def blocks(self) -> Tensor:
        """[blocks, bytes] uint8. Raises `LeaseEnded` if the process has ended."""
        if self._opened is None or self.has_ended:
            raise LeaseEnded("the process is gone")
        return self._opened.blocks

    def close(self) -> None:
        assert self._opened is not None and not self.is_busy
        os.close(self._process)
        try:
            self._opened.close()
        except DriverError as error:
            _log.warning("the memory of an engine that ended could not be closed: %s", error)
        self._opened = None


class PeerStores:
    """The stores of other processes, each opened once, and a stream for copies from them into the own store."""

    __slots__ = ("_open_memory", "_own", "_stores", "_stream")

    def __init__(self, own: KvStores, open_memory: Callable[[DeviceMemory, int], OpenedMemory] = CudaMemory) -> None:
        self._own = own
        self._open_memory = open_memory
        self._stores: dict[int, PeerStore] = {}  # by epoch
        on_gpu = own.device.is_cuda
        self._stream = torch.cuda.Stream(own.device.device) if on_gpu else None  # type: ignore[no-untyped-call]
        own.copy_from(own.raw_blocks, [0], [0])  # the null block: the kernel is compiled before the first request

    def source(self, address: BlockAddress) -> "DeviceBlocks":
        """What copies leased blocks. Raises `LeaseEnded` or `MemoryRefused`."""
        if address.memory is None:
            raise MemoryRefused("the blocks are in the memory of the host")
        lease = PeerLease(address)
        store = self._stores.get(address.epoch)
        if store is None:
            store = self._stores[address.epoch] = PeerStore(address, self._open_memory)
        return DeviceBlocks(lease, store, self._own, self._stream)

    def close_ended(self) -> None:
        """Close the memory of processes that have ended, unless a copy is under way. Call between two steps."""
        for epoch, store in tuple(self._stores.items()):
            if not store.is_busy and store.has_ended:
                store.close()
                del self._stores[epoch]

    @property
    def num_open(self) -> int:
        return len(self._stores)


class DeviceBlocks:
    """Leased blocks of another process: a `BlockSource`. Its copies are one after the other."""

    __slots__ = ("_begun", "_copied", "_lease", "_own", "_ready", "_store", "_stream")

    def __init__(
        self,
        lease: PeerLease,
        store: PeerStore,
        own: KvStores,
        stream: torch.cuda.Stream | None,  # None: on a CPU, where a copy is complete when `copy` returns
    ) -> None:
        self._lease, self._store, self._own, self._stream = lease, store, own, stream
        # Steps in flight may still write to blocks that are free by now: copies begin after them.
        self._ready = None if stream is None else torch.cuda.current_stream(own.device.device).record_event()
        self._begun: torch.cuda.Event | None = None
        self._copied: torch.cuda.Event | None = None

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert not self._store.is_busy, "a copy is under way"
        self._lease.check()
        origin = self._store.blocks
        self._store.is_busy = True
        if self._stream is None or self._ready is None:
            self._own.copy_from(origin, sources, targets)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(self._ready)
            self._begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._begun.record()
            self._own.copy_from(origin, sources, targets)
            self._copied.record()

    def device_s(self, *, wait: bool) -> float | None:
        seconds = 0.0
        if self._begun is not None and self._copied is not None:
            if wait:
                self._copied.synchronize()
            elif not self._copied.query():  # type: ignore[no-untyped-call]
                return None
            seconds = self._begun.elapsed_time(self._copied) / 1000
            self._begun = self._copied = None
        self._store.is_busy = False
        self._lease.check()
        return seconds
