"""What the cache says it holds against what the body's slots hold (I5, I16). Needs a body that can be read."""

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from quire.core.ids import BlockId
from quire.core.moves import Place
from quire.core.step import Runner
from quire.kv.manager import KVManager
from quire.kv.radix_node import TOKEN_BYTES


@runtime_checkable
class Readable(Protocol):
    """A body whose blocks can be looked into: (token, position) for each slot."""

    def read(self, place: Place) -> NDArray[np.int64]: ...


def audit_contents(kv: KVManager, body: Runner) -> None:
    """Every cached block holds the tokens it is keyed by, at their positions. Not while copies are still ordered."""
    if kv.tree is None or kv.has_orders or not isinstance(body, Readable):
        return
    for node in kv.tree.nodes():
        tokens = np.frombuffer(node.tokens, dtype=">u4").astype(np.int64)
        start = len(node.path()) // TOKEN_BYTES - len(tokens)
        held = np.concatenate([body.read(Place(node.tier, BlockId(int(block)))) for block in node.blocks])
        right = np.stack([tokens, np.arange(start, start + len(tokens))], axis=1)
        assert (held[: len(tokens)] == right).all(), f"{node} holds {held[: len(tokens)].tolist()}"
