"""What the prefix tree answers when it is asked, grown or trimmed. Messages alone."""

from typing import NamedTuple

from quire.core.ids import IntArray
from quire.core.moves import Move, Place
from quire.kv.radix_node import Node


class Partial(NamedTuple):
    """The block that continues a match for less than its length. Who copies it holds it until the copy is ordered."""

    place: Place
    num_tokens: int
    node: Node


class Match(NamedTuple):
    """The longest known prefix: whole blocks on the device, then whole blocks on the host, then part of a block."""

    num_tokens: int  # on the device
    blocks: IntArray
    node: Node  # it ends where the device's part ends; the root if there is none
    host_blocks: IntArray
    host_node: Node | None  # it ends where the host's part ends: what `promote` wants
    partial: Partial | None


class Inserted(NamedTuple):
    """The node where the path now ends; the blocks adopted; whether others' blocks already hold some of it."""

    node: Node
    num_adopted: int
    conflict: bool


class Evicted(NamedTuple):
    """How many blocks of the device are free again, and the copies to the host to order for some of them."""

    num_blocks: int
    moves: tuple[Move, ...]
