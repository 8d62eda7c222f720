"""How the KV blocks of a prefill engine get to a decode engine: through the memory of one machine, or over the network.

Engines of one machine share memory; NIXL reads that of another machine, where it is installed. On a GPU blocks are
copied by CUDA IPC (`runner/cuda_ipc.py`), so far on one machine only.

A lease has both addresses, so that the decode engine chooses for each prefill engine: it knows whether that one is on
its own machine.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from quire.core.shared_blocks import BlockAddress, MemoryRefused, PeerBlocks, SharedBlocks, machine_name
from quire.dist.nixl_blocks import NixlPeers, TransferAgent, offer_blocks, serve_blocks
from quire.engine.prefix_transfer import COPY_BYTES, BlockSource


class BlockTransport:
    """The transport of one engine."""

    def __init__(self, agent: TransferAgent | None = None, *, local: bool = True) -> None:
        """`agent`: of NIXL, if blocks may come from other machines; `local`: whether memory of this one is shared."""
        assert agent is not None or local
        self._agent = agent
        self._local = local

    @property
    def is_remote(self) -> bool:
        """Whether blocks may come from other machines, or go there."""
        return self._agent is not None

    def offer(self, shared: SharedBlocks) -> None:
        """Let other engines read these blocks. Those of this machine can."""
        if self._agent is not None:
            offer_blocks(self._agent, shared)
            serve_blocks(self._agent, shared)

    def reader(self, targets: NDArray[np.uint8], clock: Callable[[], float]) -> Callable[[BlockAddress], BlockSource]:
        """What opens leased blocks of other engines, to copy them into these: [blocks, bytes]."""
        machine = machine_name()
        peers = None
        if self._agent is not None:
            peers = NixlPeers(self._agent, targets, clock, COPY_BYTES)
            peers.start()

        def open_source(address: BlockAddress) -> BlockSource:
            if self._local and address.machine == machine:
                return PeerBlocks(address, targets)
            if peers is None:
                raise MemoryRefused(
                    "the prefill engine is on another machine, which takes NIXL here and there "
                    '(pip install "quire[nixl]")'
                )
            return peers.source(address)

        return open_source


LOCAL_TRANSPORT = BlockTransport()
