"""Logprobs of sampled or given tokens, their ranks and top alternatives; and the candidates of beam search.

Logprobs come from raw logits. The device part does not synchronise; `wait` fetches the result in one transfer.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.ids import IntArray, Row
from quire.core.step import Candidates, TopLogprobs
from quire.kernels.transfers import HostCopy
from quire.sampling.filters import ids_of, ordering_keys

_LOGPROBS_AT_ONCE = 2**22  # logits; each takes some 24 bytes of workspace


class Scores(NamedTuple):
    """Logprobs being copied to the host: integers, and floats by their bits, in one tensor."""

    packed: HostCopy  # [m, 3 + 2 * num_top] int32: token, rank, logprob, top ids, top logprobs
    num_top: int

    def wait(self, counts: Sequence[int] | NDArray[np.int64]) -> tuple[TopLogprobs, ...]:
        """On the host, with `counts[i]` alternatives for the i-th token."""
        integers: NDArray[np.int32] = self.packed.wait()
        floats = integers.view(np.float32)
        first_logprob = 3 + self.num_top
        return tuple(
            TopLogprobs(
                token=int(integers[i, 0]),
                rank=int(integers[i, 1]),
                logprob=float(floats[i, 2]),
                ids=integers[i, 3 : 3 + count],
                logprobs=floats[i, first_logprob : first_logprob + count],
            )
            for i, count in enumerate(counts)
        )


class RowScores(NamedTuple):
    """The logprobs of the tokens that rows got in a step."""

    host_rows: IntArray
    counts: NDArray[np.int64]
    scores: Scores

    def wait(self) -> dict[Row, TopLogprobs]:
        return {Row(int(row)): score for row, score in zip(self.host_rows, self.scores.wait(self.counts), strict=True)}


def token_logprobs_reference(
    logits: Tensor,  # [m, vocab] float32
    tokens: Tensor,  # [m] int64
    num_top: int,  # at most vocab
) -> Tensor:  # [m, 3 + 2 * num_top] int32
    """See `TokenLogprobs`."""
    size = max(1, _LOGPROBS_AT_ONCE // logits.shape[1])
    pieces = [
        _logprobs_slice(logits[start : start + size], tokens[start : start + size], num_top)
        for start in range(0, max(1, len(logits)), size)
    ]
    return torch.cat(pieces)


def _logprobs_slice(logits: Tensor, tokens: Tensor, num_top: int) -> Tensor:
    logprobs = torch.log_softmax(logits, dim=-1)
    rank = (logits > logits.gather(-1, tokens[:, None])).sum(-1, keepdim=True) + 1
    top_ids = ids_of(ordering_keys(logits).topk(num_top, dim=-1).values)
    places = torch.cat([tokens[:, None], top_ids], dim=-1)
    scores = logprobs.gather(-1, places).view(torch.int32)
    return torch.cat([tokens[:, None].int(), rank.int(), scores[:, :1], top_ids.int(), scores[:, 1:]], dim=-1)


class LineScores(NamedTuple):
    """The logprobs of tokens of rows that may get several in a step: those of any draft that may have been rejected."""

    host_rows: IntArray
    numbers: NDArray[np.int64]  # of each token in its row
    counts: NDArray[np.int64]
    scores: Scores

    def wait(self) -> list[dict[Row, TopLogprobs]]:
        """By the number of the token."""
        found: list[dict[Row, TopLogprobs]] = [{} for _ in range(int(self.numbers.max()) + 1)]
        scores = self.scores.wait(self.counts)
        for row, number, score in zip(self.host_rows.tolist(), self.numbers.tolist(), scores, strict=True):
            found[number][Row(row)] = score
        return found


class RowCandidates(NamedTuple):
    """Candidates of host-driven rows, being copied to the host: integers, and floats by their bits."""

    host_rows: IntArray
    counts: NDArray[np.int64]
    finite: Tensor  # [n] bool: False for a failed row
    packed: HostCopy  # [n, 1 + 2 * most] int32: finite, ids, logprobs

    def wait(self) -> dict[Row, Candidates | None]:
        """Candidates by row; None for a failed row."""
        integers: NDArray[np.int32] = self.packed.wait()
        floats = integers.view(np.float32)
        first_logprob = 1 + (integers.shape[1] - 1) // 2
        found: dict[Row, Candidates | None] = {}
        for i, (row, count) in enumerate(zip(self.host_rows.tolist(), self.counts.tolist(), strict=True)):
            best = Candidates(integers[i, 1 : 1 + count], floats[i, first_logprob : first_logprob + count])
            found[Row(row)] = best if integers[i, 0] else None
        return found


def likeliest(
    logprobs: Tensor,  # [n, vocab] float32, after the logit processors
    finite: Tensor,  # [n] bool
    host_rows: IntArray,
    counts: NDArray[np.int64],  # [n], each at most vocab
) -> RowCandidates:
    """Ties go to the lowest id. A forbidden token has -inf and comes last."""
    ids = ids_of(ordering_keys(logprobs).topk(int(counts.max()), dim=-1).values)
    packed = torch.cat([finite.int()[:, None], ids.int(), logprobs.gather(-1, ids).view(torch.int32)], dim=-1)
    return RowCandidates(host_rows, counts, finite, HostCopy(packed))
