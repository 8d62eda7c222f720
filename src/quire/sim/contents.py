"""What the cache says it holds against what the body's slots hold (I5, I16). Needs a body that can be read."""

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from quire.core.moves import Tier
from quire.core.step import Runner
from quire.kv.manager import KVManager
from quire.kv.radix_node import TOKEN_BYTES, decode


@runtime_checkable
class Readable(Protocol):
    """A body whose blocks can be looked into: (token, position) for each slot."""

    def read(self, tier: Tier, blocks: Iterable[int]) -> list[tuple[int, int]]: ...


def audit_contents(kv: KVManager, body: Runner) -> None:
    """Every cached block holds the tokens it is keyed by, at their positions. Not while copies are still ordered."""
    if kv.tree is None or kv.has_orders or not isinstance(body, Readable):
        return
    for node in kv.tree.nodes():
        tokens = decode(node.tokens)
        stop = len(node.path()) // TOKEN_BYTES
        held = body.read(node.tier, node.blocks.tolist())[: len(tokens)]
        right = list(zip(tokens, range(stop - len(tokens), stop), strict=True))
        assert held == right, f"{node} holds {held}"
