"""A network of NIXL agents inside one process: transfers take as many looks as a test says, and owners die."""

import ctypes
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Network:
    dead: set[str] = field(default_factory=set)
    num_looks: int = 0  # at a transfer, until it ends
    connections: Counter[str] = field(default_factory=Counter)


@dataclass(eq=False)
class _Transfer:
    peer: str
    pairs: list[tuple[tuple[int, int], tuple[int, int]]]
    num_looks: int = 0


class SimulatedAgent:
    """A `TransferAgent`."""

    def __init__(self, name: str, network: Network) -> None:
        self.name = name
        self._network = network
        self._known: set[str] = set()
        self.under_way: list[_Transfer] = []

    def register_memory(self, reg_list: Any, mem_type: str) -> Any:
        assert mem_type == "DRAM"

    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def get_new_notifs(self) -> Any:
        return {}

    def add_remote_agent(self, metadata: bytes) -> str:
        name = metadata.decode()
        if name in self._network.dead:
            raise RuntimeError("NIXL_ERR_BACKEND")
        self._network.connections[name] += 1
        self._known.add(name)
        return name

    def remove_remote_agent(self, agent: str) -> None:
        self._known.remove(agent)  # what is under way goes on, as NIXL's transfers do

    def prep_xfer_dlist(self, agent_name: str, xfer_list: Any, mem_type: str) -> Any:
        if isinstance(xfer_list, np.ndarray):
            first, size, _, stride, count = (int(each) for each in xfer_list[0])
            return agent_name, [(first + stride * place, size) for place in range(count)]
        return agent_name, [(address, size) for address, size, _ in xfer_list]

    def make_prepped_xfer(
        self, operation: str, local_xfer_side: Any, local_indices: Any, remote_xfer_side: Any, remote_indices: Any
    ) -> Any:
        assert operation == "READ" and local_xfer_side[0] == "NIXL_INIT_AGENT"
        name, remote = remote_xfer_side
        own = [local_xfer_side[1][place] for place in local_indices]
        return _Transfer(name, list(zip(own, [remote[place] for place in remote_indices], strict=True)))

    def transfer(self, handle: Any) -> str:
        if handle.peer not in self._known:
            raise RuntimeError("NIXL_ERR_NOT_FOUND")
        handle.num_looks = self._network.num_looks
        self.under_way.append(handle)
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if handle.peer in self._network.dead:
            raise RuntimeError("NIXL_ERR_REMOTE_DISCONNECT")
        if handle.num_looks:
            handle.num_looks -= 1
            return "PROC"
        for (own, size), (theirs, their_size) in handle.pairs:
            assert size == their_size
            ctypes.memmove(own, theirs, size)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        self.under_way.remove(handle)
