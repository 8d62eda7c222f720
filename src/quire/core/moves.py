"""Where a block lies, and the order to copy one: swap, demotion, promotion and copy-on-write are all this."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from quire.core.ids import BlockId


class Tier(Enum):
    """Which store holds a block. Each has its own pool of ids."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Place:
    """One block of one store."""

    tier: Tier
    block: BlockId


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one whole block. The paper orders, the runner carries."""

    src: Place
    dst: Place


class MoveRun(NamedTuple):
    """Neighbouring moves between the same two stores: block `sources[i]` goes to `targets[i]`.

    No block is written that another move of its run reads or writes: they may be carried all at once, in any order.
    """

    src: Tier
    dst: Tier
    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]


def runs(moves: Iterable[Move]) -> Iterator[MoveRun]:
    """The moves in their order, as few runs."""
    run: list[Move] = []
    read: set[Place] = set()
    written: set[Place] = set()
    for move in moves:
        alike = not run or (move.src.tier, move.dst.tier) == (run[0].src.tier, run[0].dst.tier)
        if not alike or move.src in written or move.dst in written or move.dst in read:
            yield _run(run)
            run, read, written = [], set(), set()
        run.append(move)
        read.add(move.src)
        written.add(move.dst)
    if run:
        yield _run(run)


def _run(moves: list[Move]) -> MoveRun:
    sources, targets = tuple(move.src.block for move in moves), tuple(move.dst.block for move in moves)
    return MoveRun(moves[0].src.tier, moves[0].dst.tier, sources, targets)
