"""KV blocks between two processes by the real NIXL: `python use_nixl.py - -`, with quire, NIXL and numpy in its path.

An owner in a process of its own, which is stopped, killed and started again. Prints one JSON line per case, with the
error if it had one.
"""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
from cases import main, raises, same
from nixl_cu13._api import nixl_agent, nixl_agent_config

from quire.core.shared_blocks import BlockAddress, ConnectionEnded, LeaseEnded, NetworkMemory, SharedBlocks
from quire.dist.nixl_blocks import MAX_BUFFERS, NixlBlocks, NixlPeers, offer_blocks, serve_blocks

NUM_BLOCKS, SIZE = 256, 1 << 18


def new_agent() -> nixl_agent:
    return nixl_agent(f"test-{os.getpid()}", nixl_agent_config(False, backends=["UCX"]))


def own_blocks() -> None:
    """The owner's process: grants and revokes leases, as it is asked to."""
    shared = SharedBlocks(NUM_BLOCKS, SIZE)
    shared.blocks[:] = (np.arange(NUM_BLOCKS) % 200 + 1).astype(np.uint8)[:, None]
    agent = new_agent()
    offer_blocks(agent, shared)
    serve_blocks(agent, shared)
    for line in sys.stdin:
        if line.startswith("revoke"):
            shared.revoke(int(line.split()[1]))
        print(json.dumps({"reply": shared.grant() if line == "grant\n" else None}), flush=True)


class Owner:
    def __init__(self) -> None:
        command = [sys.executable, __file__, "-", "-", "owner"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, line: str) -> list[object] | None:
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        for said in self.process.stdout:
            if said.startswith('{"reply"'):
                return json.loads(said)["reply"]
        raise AssertionError("the owner has ended")

    def lease(self) -> BlockAddress:
        *others, network = self.ask("grant")
        return BlockAddress(*others, NetworkMemory(*network))

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


TARGETS = np.zeros((NUM_BLOCKS, SIZE), dtype=np.uint8)


class Exchange:
    """What the cases share."""

    owner: Owner
    peers: NixlPeers


def copied(source: NixlBlocks) -> float:
    while (seconds := source.device_s(wait=False)) is None:
        time.sleep(1e-4)
    return seconds


def leased_blocks_are_copied_by_their_ids() -> None:
    Exchange.owner = Owner()
    Exchange.peers = NixlPeers(new_agent(), TARGETS, time.monotonic, TARGETS.nbytes)
    Exchange.peers.start()
    source = Exchange.peers.source(Exchange.owner.lease())
    source.copy([7, 9, 200], [100, 1, 2])
    copied(source)
    same([int(TARGETS[block, 0]) for block in (100, 1, 2)], [8, 10, 1])
    same([bool((TARGETS[block] == TARGETS[block, 0]).all()) for block in (100, 1, 2)], [True] * 3)
    same(int((TARGETS[:, 0] > 0).sum()), 3)
    source.copy(range(NUM_BLOCKS), range(NUM_BLOCKS))
    seconds = copied(source)
    print(f"{TARGETS.nbytes / seconds / 1e9:.2f} GB/s", file=sys.stderr)
    wanted = (np.arange(NUM_BLOCKS) % 200 + 1)[:, None]
    same(int((wanted != TARGETS).sum()), 0)


def a_lease_that_was_revoked_has_not_lasted() -> None:
    address = Exchange.owner.lease()
    source = Exchange.peers.source(address)
    Exchange.owner.ask(f"revoke {address.slot}")
    source.copy([1], [1])
    error = raises(LeaseEnded, lambda: copied(source))
    same(isinstance(error, ConnectionEnded), False)
    same(Exchange.owner.lease().slot, address.slot)


def a_copy_that_is_given_up_writes_nothing() -> None:
    """The owner stands still, and goes on when nothing is expected of it any more."""
    address = Exchange.owner.lease()
    TARGETS[:] = 77
    for _ in range(2 * MAX_BUFFERS):
        source = Exchange.peers.source(address)
        Exchange.owner.signal(signal.SIGSTOP)
        source.copy(range(NUM_BLOCKS), range(NUM_BLOCKS))
        same(source.device_s(wait=False), None)
        source.device_s(wait=True)
        Exchange.owner.signal(signal.SIGCONT)
    last = Exchange.peers.source(address)
    last.copy([3], [4])
    copied(last)  # it has a buffer: the others have ended
    same(np.flatnonzero((TARGETS != 77).any(axis=1)).tolist(), [4])


def an_owner_is_read_again() -> None:
    source = Exchange.peers.source(Exchange.owner.lease())
    source.copy([3], [4])
    copied(source)
    same(int(TARGETS[4, 0]), 4)


def a_killed_owner_is_seen_and_another_one_read() -> None:
    address = Exchange.owner.lease()
    source = Exchange.peers.source(address)
    Exchange.owner.signal(signal.SIGSTOP)
    source.copy(range(NUM_BLOCKS), range(NUM_BLOCKS))
    Exchange.owner.signal(signal.SIGKILL)
    raises(ConnectionEnded, lambda: copied(source))

    def read_again() -> None:
        again = Exchange.peers.source(address)
        again.copy([1], [1])
        copied(again)

    raises(ConnectionEnded, read_again)
    Exchange.owner = Owner()
    an_owner_is_read_again()
    Exchange.owner.signal(signal.SIGKILL)


if sys.argv[3:] == ["owner"]:
    own_blocks()
else:
    main(
        leased_blocks_are_copied_by_their_ids,
        a_lease_that_was_revoked_has_not_lasted,
        a_copy_that_is_given_up_writes_nothing,
        an_owner_is_read_again,
        a_killed_owner_is_seen_and_another_one_read,
    )
