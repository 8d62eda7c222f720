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


class Run(NamedTuple):
    """Neighbouring moves between the same two stores: block `sources[i]` goes to `targets[i]`.

    None reads what another of its run wrote, and no two write the same block: they may be carried all at once.
    """

    src: Tier
    dst: Tier
    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]


def runs(moves: Iterable[Move]) -> Iterator[Run]:
    """The moves in their order, as few runs."""
    run: list[Move] = []
    written: set[Place] = set()
    for move in moves:
        alike = not run or (move.src.tier, move.dst.tier) == (run[0].src.tier, run[0].dst.tier)
        if not alike or move.src in written or move.dst in written:
            yield _run(run)
            run, written = [], set()
        run.append(move)
        written.add(move.dst)
    if run:
        yield _run(run)


def _run(moves: list[Move]) -> Run:
    sources, targets = tuple(move.src.block for move in moves), tuple(move.dst.block for move in moves)
    return Run(moves[0].src.tier, moves[0].dst.tier, sources, targets)
