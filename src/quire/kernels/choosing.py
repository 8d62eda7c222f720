"""What the kernels must offer that work by row: what each does next, which token it gets, and whether that ends it.

All read what is known of a row from columns on the device, by row number, so that one recorded graph serves any mixture
of rows. Row -1 is padding: nothing is read or written for it, and its results are zeros.
"""

from enum import IntEnum
from typing import NamedTuple, Protocol

from torch import Tensor

PADDING = -1  # in the place of a row number


class Stages(IntEnum):
    """How much may be asked of a batch; each holds all before it. A stage more costs a launch more."""

    GREEDY = 0
    RANDOM = 1  # temperature, min-p
    CHOOSY = 2  # top-k, top-p


class ChoiceTable(NamedTuple):
    """The sampling parameters of every row. More columns may follow those named here."""

    integers: Tensor  # [max_rows, 4+] int64: seed, sequence index, top_k (vocab keeps all), 1 if random or 0
    floats: Tensor  # [max_rows, 3+] float64: temperature above 0, top_p (1 keeps all), min_p (0 keeps all)


class Chosen(NamedTuple):
    """A row that is not finite had a NaN or +inf logit, or nothing to choose; its token is 0."""

    tokens: Tensor  # [n] int64
    finite: Tensor  # [n] bool


class ChooseTokens(Protocol):
    """A token for every row of a batch."""

    def __call__(
        self,
        logits: Tensor,  # [n, vocab] float32; not changed
        rows: Tensor,  # [n] int64; -1 is padding
        positions: Tensor,  # [n] int64: the index that the new token will have in its sequence
        table: ChoiceTable,
        stages: Stages,  # what no row of the batch goes beyond
    ) -> Chosen: ...


class EndColumns(NamedTuple):
    """When every row ends."""

    max_length: Tensor  # [max_rows] int64
    end_ids: Tensor  # [max_rows, width] int64, padded with -1


class RowState(NamedTuple):
    """What the device alone knows of every row; changed in place."""

    last_tokens: Tensor  # [max_rows] int64
    lengths: Tensor  # [max_rows] int64
    alive: Tensor  # [max_rows] bool


class FinishRows(Protocol):
    """Gives every row of a batch its token, and ends those that it ends."""

    def __call__(
        self,
        chosen: Chosen,
        rows: Tensor,  # [n] int64, none twice but -1
        positions: Tensor,  # [n] int64
        ends: EndColumns,
        state: RowState,
    ) -> Tensor:  # [5, n] int64: token, alive before, finite, stop, length
        ...


class RowColumns(NamedTuple):
    """What is known of every row that is going on."""

    tables: Tensor  # [max_rows, width] int32: block tables
    lengths: Tensor  # [max_rows] int64: known tokens, at least one
    reaches: Tensor  # [max_rows] int64: tokens it may come to hold
    last_tokens: Tensor  # [max_rows] int64
    alive: Tensor  # [max_rows] bool


class NextTokens(NamedTuple):
    """The next token of some rows: which, where, and what it sees. Whoever is not alive sees nothing, says nothing, and
    writes to the null block."""

    tokens: Tensor  # [n] int64
    positions: Tensor  # [n] int64
    slots: Tensor  # [n] int64: where its key and value are written
    reaches: Tensor  # [n] int64
    speaking: Tensor  # [n] int64: the row, or PADDING
    context_lengths: Tensor  # [n] int32
    tables: Tensor  # [n, width] int32


class CruiseRows(Protocol):
    """What rows that go on by themselves do next."""

    def __call__(
        self,
        rows: Tensor,  # [n] int64, none of them padding
        columns: RowColumns,
        block_size: int,
    ) -> NextTokens: ...


class Choosing(NamedTuple):
    """The three together."""

    choose: ChooseTokens
    finish: FinishRows
    cruise: CruiseRows
