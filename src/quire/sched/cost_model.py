"""Cost model: predicts the seconds of a step from a roofline of model and device, corrected by measured steps.

A pure function of its constants and its observations, in order: no clock, no device. Does not depend on requests.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import hypot, inf
from typing import NamedTuple

# None of these numbers was tuned.
WINDOW = 15  # measurements a median looks back on
MIN_MEASUREMENTS = 3  # measurements before a median corrects anything: one outlier among them does no harm
TOLERANCE = 0.05  # a correction stays until the median differs from it by this fraction
DRAFTS_DIFFER = 1.25  # at most, corrections of a step with drafts and of the same step without
MAX_BUCKETS = 1024  # the one observed longest ago is forgotten first


class StepShape(NamedTuple):
    """All that the cost of a step depends on."""

    num_rows: int = 0  # decoding rows
    num_context: int = 0  # KV tokens that the decoding rows read, together
    num_chunk_tokens: int = 0
    chunk_context: int = 0  # KV tokens that the chunks' tokens read, itself and all before it for each, together
    num_drafts: int = 0  # that decoding rows verify, together
    num_draft_passes: int = 0  # of a draft model: as many as the row with the most drafts has

    def with_drafts(self, number: int, num_passes: int | None = None) -> "StepShape":
        """The same step with this number of drafts. `num_passes`: by default, all rows have as many drafts."""
        return self._replace(
            num_drafts=number,
            num_draft_passes=-(-number // max(1, self.num_rows)) if num_passes is None else num_passes,
        )

    def with_chunk(self, start: int, length: int) -> "StepShape":
        """The same step with a further chunk of the positions [start, start + length)."""
        return self.with_chunks(((start, length),))

    def with_chunks(self, chunks: Iterable[tuple[int, int]]) -> "StepShape":
        """The same step with further chunks, each by its start and its length."""
        num_chunk_tokens, chunk_context = self.num_chunk_tokens, self.chunk_context
        for start, length in chunks:
            num_chunk_tokens += length
            chunk_context += length * start + length * (length + 1) // 2
        return self._replace(num_chunk_tokens=num_chunk_tokens, chunk_context=chunk_context)


@dataclass(frozen=True, slots=True)
class Constants:
    """The roofline: overhead, reading the weights and multiplying by them, which overlap in part, and attention.

    Of a step in which one takes much longer than the other, the longer is seen; where both take as long, 1.4 times
    that, as on an H200 (docs/performance/ledger, section 48).
    """

    seconds_per_step: float  # whatever the step holds
    seconds_per_weights: float  # reading them once: a step with few tokens waits for memory
    seconds_per_token: float  # multiplying by them: one with many for arithmetic
    seconds_per_context_token: float  # one KV token read by a decoding row
    seconds_per_attention_pair: float  # one KV token read by one token of a chunk
    context_per_draft: float = 1.0  # of a row's KV tokens, the share that each of its drafts reads again
    # Of a draft model, which proposes one draft of each row in a pass: reading its weights, and multiplying by them.
    seconds_per_draft_pass: float = 0.0
    seconds_per_draft_token: float = 0.0
    # How much more than by this model, and by the correction of the same step without, a step with drafts may take.
    drafts_dearer: float = DRAFTS_DIFFER


# A small model on a small machine, until steps are measured: only the proportions matter.
UNMEASURED = Constants(1e-3, 1e-2, 1e-4, 1e-8, 1e-8)


def roofline(
    *,
    num_parameters: int,
    weight_bytes: int,
    kv_bytes_per_token: int,
    flops_per_s: float,
    bytes_per_s: float,
    overhead_s: float,
    context_per_draft: float = 1.0,
) -> Constants:
    """Constants from the data sheet of model and device. `num_parameters`: those that one token uses."""
    return Constants(
        seconds_per_step=overhead_s,
        seconds_per_weights=weight_bytes / bytes_per_s,
        seconds_per_token=2 * num_parameters / flops_per_s,
        seconds_per_context_token=kv_bytes_per_token / bytes_per_s,
        # 2 operations for each number of K and V and each query head that shares it: 16-bit numbers, 4 such heads.
        seconds_per_attention_pair=4 * kv_bytes_per_token / flops_per_s,
        context_per_draft=context_per_draft,
    )


class _Bucket(NamedTuple):
    """Shapes alike. A factor of 2 in what a step computes, of 4 in how far back it reads."""

    num_rows: int
    num_context: int
    num_chunk_tokens: int
    depth: int
    num_drafts: int  # few are told apart: a step with 3 is not one with 2


class _Kind(NamedTuple):
    """All shapes that do the same kinds of work."""

    decodes: bool
    prefills: bool


class CostTable:
    """Predicts seconds. `version` grows whenever a prediction may have changed."""

    __slots__ = ("_buckets", "_kinds", "constants", "largest_chunk", "seconds_per_block", "version")

    def __init__(self, constants: Constants, largest_chunk: int = 2048) -> None:
        assert largest_chunk > 0
        self.constants = constants
        self.largest_chunk = largest_chunk
        self._buckets: dict[_Bucket, _RunningMedian] = {}  # by their last observation, the oldest first
        self._kinds: dict[_Kind, _RunningMedian] = {}
        self.seconds_per_block: float | None = None
        self.version = 0

    # Steps.

    def predict_s(self, shape: StepShape) -> float:
        """The roofline times the correction of its bucket; of its kind, where the bucket has none.

        Steps with drafts are measured at other times than those without, and compared with them: their correction
        differs from that of the same step without drafts by little.
        """
        correction = self._correction(shape)
        if shape.num_drafts:
            plain = self._correction(shape.with_drafts(0)) or 1.0
            correction = min(max(correction or plain, plain / DRAFTS_DIFFER), plain * self.constants.drafts_dearer)
        return (correction or 1.0) * self._roofline_s(shape)

    def _correction(self, shape: StepShape) -> float | None:
        known = self._buckets.get(_bucket(shape))
        if (known is None or known.value is None) and not shape.num_drafts:
            known = self._kinds.get(_kind(shape))
        return None if known is None else known.value

    def observe(self, shape: StepShape, seconds: float) -> None:
        """A step of this shape took `seconds`."""
        assert seconds > 0, seconds
        ratio = seconds / self._roofline_s(shape)
        bucket = _bucket(shape)
        known = self._buckets.pop(bucket, None) or _RunningMedian()
        self._buckets[bucket] = known
        changed = known.note(ratio)
        if not shape.num_drafts:
            kind = _kind(shape)
            if kind not in self._kinds:
                self._kinds[kind] = _RunningMedian()
            changed |= self._kinds[kind].note(ratio)
        if len(self._buckets) > MAX_BUCKETS:
            forgotten = self._buckets.pop(next(iter(self._buckets)))
            changed |= forgotten.value is not None
        self.version += changed

    def _roofline_s(self, shape: StepShape) -> float:
        constants = self.constants
        num_tokens = shape.num_rows + shape.num_chunk_tokens + shape.num_drafts
        num_context: float = shape.num_context
        drafting_s = 0.0
        if shape.num_drafts:
            num_passes = max(1, shape.num_draft_passes)
            in_a_pass = constants.seconds_per_draft_token * shape.num_drafts / num_passes
            drafting_s = num_passes * hypot(constants.seconds_per_draft_pass, in_a_pass)
            num_context += constants.context_per_draft * (shape.num_drafts * num_context // max(1, shape.num_rows))
        return (
            constants.seconds_per_step
            + drafting_s
            + hypot(constants.seconds_per_weights, constants.seconds_per_token * num_tokens)
            + constants.seconds_per_context_token * num_context
            + constants.seconds_per_attention_pair * shape.chunk_context
        )

    # Preemption: recompute or swap.

    def recompute_s(self, start: int, stop: int) -> float:
        """Computing the positions [start, stop) again, in steps that hold nothing else."""
        starts = range(start, stop, self.largest_chunk)
        lengths = (min(self.largest_chunk, stop - first) for first in starts)
        return sum(self.predict_s(StepShape().with_chunk(*chunk)) for chunk in zip(starts, lengths, strict=True))

    def set_transfer(self, seconds_per_block: float | None) -> None:
        """Measured time to copy one block one way. None: there is no host tier."""
        self.version += seconds_per_block != self.seconds_per_block
        self.seconds_per_block = seconds_per_block

    def transfer_s(self, num_blocks: int) -> float:
        """Copying blocks one way."""
        return inf if self.seconds_per_block is None else num_blocks * self.seconds_per_block

    def cheaper_to_swap(self, start: int, stop: int, num_blocks: int) -> bool:
        """Whether swapping the blocks of [start, stop) out and in takes less time than recomputing them."""
        return 2 * self.transfer_s(num_blocks) < self.recompute_s(start, stop)


class _RunningMedian:
    """The correction that the latest ratios of observed to predicted seconds agree on."""

    __slots__ = ("_recent", "value")

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self.value: float | None = None

    def note(self, ratio: float) -> bool:
        """Whether the correction changed."""
        self._recent.append(ratio)
        if len(self._recent) < MIN_MEASUREMENTS:
            return False
        middle = sorted(self._recent)[len(self._recent) // 2]
        if self.value is not None and abs(middle - self.value) <= TOLERANCE * self.value:
            return False
        self.value = middle
        return True


def _bucket(shape: StepShape) -> _Bucket:
    depth = shape.chunk_context // max(1, shape.num_chunk_tokens)
    return _Bucket(
        shape.num_rows.bit_length(),
        (shape.num_context.bit_length() + 1) // 2,
        shape.num_chunk_tokens.bit_length(),
        (depth.bit_length() + 1) // 2,
        shape.num_drafts if shape.num_drafts <= 4 else 2 + shape.num_drafts.bit_length(),
    )


def _kind(shape: StepShape) -> _Kind:
    return _Kind(shape.num_rows > 0, shape.num_chunk_tokens > 0)
