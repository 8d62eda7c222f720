"""Plans made by hand, as short as they can be said."""

from collections.abc import Sequence as Many

import numpy as np

from quire.core.ids import BlockId, Row, SequenceId
from quire.core.moves import Move, Place, Tier
from quire.core.sampling import RowSampling
from quire.core.step import Chunk, ChunkOutput, Grants, RowStart, StepResult

DEVICE, HOST = Tier.DEVICE, Tier.HOST


def row_start(
    row: int, known: Many[int], max_length: int = 40, *, num_prompt: int | None = None, **sampling: object
) -> RowStart:
    """A sequence numbered as its row; all it knows is its prompt unless said otherwise."""
    return seat_of(row, row, known, max_length, num_prompt=num_prompt, **sampling)


def seat_of(
    sequence: int,
    row: int,
    known: Many[int],
    max_length: int = 40,
    *,
    num_prompt: int | None = None,
    **sampling: object,
) -> RowStart:
    return RowStart(
        Row(row),
        SequenceId(sequence),
        0,
        np.array(known, dtype=np.int32),
        len(known) if num_prompt is None else num_prompt,
        max_length,
        RowSampling(**sampling),  # type: ignore[arg-type]
    )


def grants(tables: dict[int, Many[int]]) -> Grants:
    """So many blocks more for each row."""
    rows = [row for row, blocks in tables.items() for _ in blocks]
    return Grants(np.array(rows, np.int32), np.array([b for blocks in tables.values() for b in blocks], np.int32))


def sample(row: int, start: int, stop: int) -> Chunk:
    return Chunk(Row(row), start, stop - start, ChunkOutput.SAMPLE)


def host_driven(row: int, start: int, stop: int) -> Chunk:
    return Chunk(Row(row), start, stop - start, ChunkOutput.CANDIDATES)


def moves(src: Tier, dst: Tier, *pairs: tuple[int, int]) -> tuple[Move, ...]:
    return tuple(Move(Place(src, BlockId(a)), Place(dst, BlockId(b))) for a, b in pairs)


def emitted(result: StepResult) -> dict[int, int]:
    return dict(zip(result.rows.tolist(), result.tokens.tolist(), strict=True))
