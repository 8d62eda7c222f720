"""Prefill/decode split: whether a prompt is computed where its tokens will be generated, or by a prefill engine.

The rule compares seconds. Here, the prompt waits for those before it, is computed, and its chunks delay every request
that generates tokens. There, it waits for the prompts of the prefill engine, is computed, handed over and copied; the
copy delays these requests, too. Costs are predicted by the cost tables of the engines; handing over and copying are
measured. A pure function of these numbers: does not depend on engines, clocks or requests.
"""

from collections import deque
from typing import NamedTuple

import numpy as np

from quire.sched.cost_model import CostTable, StepShape

SHORTEST = 64  # tokens: the first length whose time an engine predicts; the others are its doubles
MEASURED = 15  # the latest transfers, whose medians count
USUAL_BYTES_PER_S = 2e9  # until transfers are measured: shared memory on a small machine
USUAL_GPU_BYTES_PER_S = 400e9  # the same between engines on a GPU
_USUAL_HANDOFF_S = 5e-3


class PrefillCosts(NamedTuple):
    """The seconds that an engine predicts for the first tokens of a prompt, by their number."""

    lengths: tuple[int, ...] = ()  # ascending
    seconds: tuple[float, ...] = ()  # in steps that hold nothing else
    largest_chunk: int = 1
    step_s: float = 0.0  # a step with a single token: what a step takes anyway where others generate tokens

    @property
    def known(self) -> bool:
        return bool(self.lengths)

    def alone_s(self, start: int, stop: int) -> float:
        """Computing the positions [start, stop) in steps of their own."""
        found = np.interp((start, stop), (0, *self.lengths), (0.0, *self.seconds))
        return float(found[1] - found[0])

    def added_s(self, start: int, stop: int) -> float:
        """The same in steps that others need anyway: what they take longer."""
        num_steps = -(-(stop - start) // self.largest_chunk)
        return max(self.alone_s(start, stop) - num_steps * self.step_s, 0.0)

    def queue_s(self, num_tokens: int) -> float:
        """Computing this number of tokens, of several prompts."""
        return num_tokens * self.alone_s(0, self.largest_chunk) / self.largest_chunk


NO_COSTS = PrefillCosts()


def prefill_costs(table: CostTable, longest: int) -> PrefillCosts:
    """What a cost table predicts now. `longest`: of all prompts."""
    lengths = [SHORTEST]
    while lengths[-1] < max(longest, table.largest_chunk):
        lengths.append(2 * lengths[-1])
    seconds: list[float] = []
    for length in lengths:
        if length <= table.largest_chunk or not seconds:
            seconds.append(table.recompute_s(0, length))
        else:  # the second half, in further steps
            seconds.append(seconds[-1] + table.recompute_s(length // 2, length))
    monotone = np.maximum.accumulate(seconds)  # buckets of a table may be corrected apart from each other
    step_s = table.predict_s(StepShape().with_chunk(0, 1))
    return PrefillCosts(tuple(lengths), tuple(map(float, monotone)), table.largest_chunk, step_s)


class DecodeLoad(NamedTuple):
    """An engine that would generate the tokens of a request, before it has the request."""

    costs: PrefillCosts
    num_cached: int  # tokens of the prompt
    num_waiting_tokens: int  # of prompts that it computes before
    num_decoding: int  # requests that generate tokens


class PrefillLoad(NamedTuple):
    """A prefill engine."""

    costs: PrefillCosts
    num_cached: int
    num_waiting_tokens: int


class TransferTimes(NamedTuple):
    """Of a prompt's KV blocks: the copy, and everything else on the way between the engines."""

    copy_s: float
    handoff_s: float


class SplitChoice(NamedTuple):
    """Both costs, in seconds of all requests. The cheaper way is taken; of equals the engine's own."""

    here_s: float
    there_s: float

    @property
    def splits(self) -> bool:
        return self.there_s < self.here_s

    @property
    def text(self) -> str:
        return f"{_ms(self.here_s)} of delay were expected here, {_ms(self.there_s)} by a prefill engine"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:,.1f} ms"


def choose(num_prompt: int, here: DecodeLoad, there: PrefillLoad, transfer: TransferTimes) -> SplitChoice:
    """The cost of both ways, for a prompt with this number of tokens. A second counts as much for a request that waits
    for its first token as for one that generates tokens: with 0.05 and 0.25 for the latter, fewer requests met their
    levels (docs/performance/split.md)."""
    here_s = (
        here.costs.queue_s(here.num_waiting_tokens)
        + here.costs.alone_s(here.num_cached, num_prompt)
        + here.num_decoding * here.costs.added_s(here.num_cached, num_prompt)
    )
    there_s = (
        there.costs.queue_s(there.num_waiting_tokens)
        + there.costs.alone_s(there.num_cached, num_prompt)
        + transfer.handoff_s
        + (1 + here.num_decoding) * transfer.copy_s
    )
    return SplitChoice(here_s, there_s)


class MeasuredTransfers:
    """Bandwidth and handing over, as the medians of the latest transfers."""

    __slots__ = ("_handoffs_s", "_seconds_per_byte")

    def __init__(self) -> None:
        self._seconds_per_byte: deque[float] = deque(maxlen=MEASURED)
        self._handoffs_s: deque[float] = deque(maxlen=MEASURED)

    def note(self, num_bytes: int, times: TransferTimes) -> None:
        """A prompt was copied."""
        if num_bytes:
            self._seconds_per_byte.append(times.copy_s / num_bytes)
        self._handoffs_s.append(times.handoff_s)

    def expected(self, num_bytes: float, usual_bytes_per_s: float = USUAL_BYTES_PER_S) -> TransferTimes:
        per_byte_s = _median(self._seconds_per_byte, 1 / usual_bytes_per_s)
        return TransferTimes(num_bytes * per_byte_s, _median(self._handoffs_s, _USUAL_HANDOFF_S))


def _median(values: "deque[float]", usual: float) -> float:
    return sorted(values)[len(values) // 2] if values else usual
