"""Block copies: copy-on-write, demotion to the host tier and promotion from it are all a `Move` between two places."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from quire.core.ids import BlockId


class Tier(Enum):
    """The memory that holds a block. Each tier has its own pool of block ids."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Place:
    """One block of one tier."""

    tier: Tier
    block: BlockId


@dataclass(frozen=True, slots=True)
class Move:
    """Copy one whole block. Created by the KV manager, executed by the runner."""

    src: Place
    dst: Place


class MoveRun(NamedTuple):
    """Consecutive moves between the same two tiers: block `sources[i]` goes to `targets[i]`.

    No move of a run writes a block that another one reads or writes, so a run may be carried out at once.
    """

    src: Tier
    dst: Tier
    sources: tuple[BlockId, ...]
    targets: tuple[BlockId, ...]


def runs(moves: Iterable[Move]) -> Iterator[MoveRun]:
    """The moves in their order, in as few runs as possible."""
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
