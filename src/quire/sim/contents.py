"""What the cache says it holds against what the body's slots hold (I5, I16). Needs a body that can be read."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import IntArray
from quire.core.moves import Tier
from quire.core.step import Runner
from quire.kv.manager import KVManager
from quire.kv.radix_node import TOKEN_BYTES


@runtime_checkable
class Readable(Protocol):
    """A body whose blocks can be looked into: (token, position) for each slot."""

    def read(self, tier: Tier, blocks: IntArray) -> NDArray[np.int64]: ...  # [blocks, block_size, 2]


def audit_contents(kv: KVManager, body: Runner) -> None:
    """Every cached block holds the tokens it is keyed by, at their positions. Not while copies are still ordered."""
    if kv.tree is None or kv.has_orders or not isinstance(body, Readable):
        return
    for node in kv.tree.nodes():
        tokens = np.frombuffer(node.tokens, dtype=">u4").astype(np.int64)
        start = len(node.path()) // TOKEN_BYTES - len(tokens)
        held = body.read(node.tier, node.blocks).reshape(-1, 2)[: len(tokens)]
        places = np.arange(start, start + len(tokens))
        right = np.array_equal(held[:, 0], tokens) and np.array_equal(held[:, 1], places)
        assert right, f"{node} holds {held.tolist()}"
