"""Pacing: how many prompt tokens a step computes, from the offered load and two latency targets.

A step with a chunk of c tokens takes T(c) by the cost table, so it carries c / T(c) prompt tokens per second. Longer
steps carry more, up to the efficient size, and delay decoding rows. A step is the smallest that
(i) is no smaller than the inter-token latency (ITL) target allows,
(ii) keeps the utilization, offered tokens per second by carried ones, below a bound, and
(iii) computes what prompts wait for within the time-to-first-token (TTFT) target, and
(iv) in the few steps that may be late, holds all that prompts lack.
If no size does, or no row decodes, it is the efficient size. The time of a step has limits, by factors of the ITL
target: a low one for the load, a high one for a queue, which grows with the root of the time that the queue takes,
and for a late step one that falls with the number of rows that it delays.

A pure function of the cost table and of arrivals and plans with their times: a replay makes the same choices.
"""

from collections.abc import Sequence as Many
from enum import Enum
from itertools import takewhile
from math import exp, sqrt
from typing import NamedTuple

from quire.sched.cost_model import CostTable, StepShape

MIN_PREFILL_TOKENS = 16  # per step with prompts, at any cost, so that prompts never starve: one block

# The default targets.
_UNNOTICED_S = 0.01  # ITL: at least this,
_BESIDE_PROMPTS = 3.0  # and this factor times the step of a single decoding row
PER_DECODE = 1.6  # and this factor times the step without prompts: a step of many rows takes long by itself
TTFT_PER_ITL = 3.0  # TTFT, of what waits, by the ITL target

# Chosen on some windows of traces, reported on others: docs/performance/ledger, section 52.
UTILIZATION = 0.3  # of (ii), within LOAD_STRETCH: a queue goes with 1 / (1 - utilization)
HIGH_UTILIZATION = 0.5  # of (ii), within MAX_STRETCH
LOAD_STRETCH = 2.2  # longest step for the load, by the ITL target, and beside many rows for long prompts
MAX_STRETCH = 6.0  # longest step that has a high utilization, by the ITL target of few rows
MANY_STRETCH = 5.0  # or by that of many
QUEUE_STRETCH = 8.4  # longest step for a queue of several seconds, by the ITL target of few rows
EFFICIENT = 0.98  # of the most tokens per second: the smallest size that reaches it is the efficient one
QUEUE_EFFICIENT = 0.995  # the same for a queue: each prompt in it waits for what a smaller size loses
LONG_STRETCH = 8.4  # longest step for long prompts, by the ITL target,
DELAY_S = 0.4  # and what it may delay all rows together
LATE = 1.15  # a step is late if it takes this factor times the usual longest
LATE_SHARE = 0.008  # of the steps with decoding rows may be late for long prompts: the ITL target is a 99th percentile
_MAX_CREDIT = 8.0  # such steps saved up
_USUAL_SHARE = 0.99  # of the steps are no longer than the usual longest
_USUAL_RATE = 0.05  # how much of its logarithm a step changes, at most
WINDOW_S = 20.0  # time constant of the offered load
_LONGER, _SHORTER = exp(_USUAL_RATE * _USUAL_SHARE), exp(_USUAL_RATE * (_USUAL_SHARE - 1.0))
_MIN_WINDOW_S = 1.0  # of the first estimate
_CACHED_DECAY = 0.97  # per admission, of the share of prompt tokens found in the cache: the latest thirty or so count


def usual_itl_s(decode_s: float) -> float:
    """The default ITL target, if a step with one decoding row takes `decode_s`."""
    return max(_UNNOTICED_S, _BESIDE_PROMPTS * decode_s)


class StepBound(Enum):
    """What decided the number of prompt tokens of a step."""

    ITL = "itl"
    LOAD = "load"
    BACKLOG = "backlog"
    LONG_PROMPT = "long_prompt"  # long prompts, as long as few steps are late
    SATURATED = "saturated"  # the load, and more of it than a step of this size carries
    EFFICIENT = "efficient"  # the efficient size, because no row decodes
    MAX_STEP = "max_step"  # the token budget, or the limit of step times


class OfferedLoad:
    """Prompt tokens that arrive per second and are not found in the cache: an exponentially weighted mean."""

    __slots__ = ("_cached", "_first_s", "_last_s", "_prompt", "_weighted")

    def __init__(self) -> None:
        self._weighted = 0.0  # tokens, less by the factor e for each window since they arrived
        self._first_s: float | None = None
        self._last_s = 0.0
        self._prompt = 1.0  # tokens of admitted prompts, and those found in the cache, weighted alike
        self._cached = 0.0

    def arrive(self, num_tokens: int, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = self._last_s = now_s
        self._decay(now_s)
        self._weighted += num_tokens

    def admit(self, num_prompt: int, num_cached: int) -> None:
        self._prompt = self._prompt * _CACHED_DECAY + num_prompt
        self._cached = self._cached * _CACHED_DECAY + num_cached

    @property
    def missed_share(self) -> float:
        """The share of prompt tokens that are not found in the cache."""
        return 1.0 - self._cached / self._prompt

    def tokens_per_s(self, now_s: float) -> float:
        if self._first_s is None:
            return 0.0
        self._decay(now_s)
        seen_s = max(self._last_s - self._first_s, _MIN_WINDOW_S)
        return self.missed_share * self._weighted / (WINDOW_S * (1.0 - exp(-seen_s / WINDOW_S)))

    def _decay(self, now_s: float) -> None:
        if now_s > self._last_s:  # clocks may jump
            self._weighted *= exp((self._last_s - now_s) / WINDOW_S)
            self._last_s = now_s


class Demand(NamedTuple):
    """What prompts ask for."""

    tokens_per_s: float = 0.0  # that arrive
    backlog: int = 0  # tokens that other prompts wait for
    long: int = 0  # all tokens that prompts lack, if a step may be late for them; else 0


class Targets(NamedTuple):
    """Of one step, in seconds. TTFT None: the ITL target is kept, whatever waits."""

    itl_s: float
    ttft_s: float | None
    limit_s: float  # of the load
    queue_limit_s: float  # however much waits
    long_limit_s: float  # for long prompts, in the few steps that may be late


class Pace(NamedTuple):
    """Prompt tokens of a step, and why."""

    num_tokens: int
    bound: StepBound
    long: bool = False  # longer than load and backlog need, for long prompts


class LateSteps:
    """How many steps may be late for the sake of long prompts: much longer than the ITL target, and than 99 in a
    hundred of the latest steps with decoding rows. Times are multiples of the ITL target of their step."""

    __slots__ = ("_credit", "usual")

    def __init__(self) -> None:
        self._credit = 0.0
        self.usual = 1.0  # the 99th percentile of the latest steps but those for long prompts; at least the target

    @property
    def allowed(self) -> bool:
        return self._credit >= 1.0

    def note(self, step: float = 0.0, *, long: bool = False) -> None:
        """A step with decoding rows, by its predicted time; 0: without prompts. `long`: it was for long prompts; only
        the others say what is usual, or late steps would soon be usual ones, and free."""
        late = step > (LATE if long else LATE * self.usual)
        self._credit = min(max(self._credit + LATE_SHARE / self.usual - late, -_MAX_CREDIT), _MAX_CREDIT)
        if not long:
            usual = self.usual * (_LONGER if step > self.usual else _SHORTER)
            self.usual = min(max(usual, 1.0), LONG_STRETCH)


class _Sizes(NamedTuple):
    """Lengths to choose from, ascending, with the predicted times of their steps."""

    lengths: list[int]
    seconds: list[float]

    def efficient(self, limit_s: float, share: float = EFFICIENT) -> int:
        """The place of the smallest that carries this share of the most tokens per second, within a limit of time."""
        count = max(1, sum(1 for _ in takewhile(lambda seconds: seconds <= limit_s, self.seconds)))
        rates = [self.lengths[place] / self.seconds[place] for place in range(count)]
        enough = share * max(rates)
        return next(place for place, rate in enumerate(rates) if rate >= enough)

    def carrying(self, tokens_per_s: float, last: int) -> int:
        """The place of the smallest that carries this much; the last if none before it does."""
        places = (place for place in range(last) if self.lengths[place] >= tokens_per_s * self.seconds[place])
        return next(places, last)

    def holding(self, num_tokens: int, limit_s: float) -> int:
        """The place of the smallest that holds this many; the largest within a limit of time if none does."""
        last = max(sum(1 for _ in takewhile(lambda seconds: seconds <= limit_s, self.seconds)) - 1, 0)
        return next((place for place in range(last) if self.lengths[place] >= num_tokens), last)


def long_limit_s(usual_s: float, itl_s: float, num_rows: int) -> float:
    """The longest step for long prompts beside this many rows: beyond the usual longest by what they may lose."""
    more_s = max(DELAY_S / max(num_rows, 1), (LOAD_STRETCH - 1.0) * itl_s)
    return min(usual_s + more_s, LONG_STRETCH * itl_s)


def choose_pace(
    table: CostTable, step: StepShape, start: int, most: int, sizes: Many[int], targets: Targets, demand: Demand
) -> Pace:
    """The number of prompt tokens, at most `most`, beside the decoding rows of `step`; the first is at `start`.

    `sizes`: captured sizes; without any, every length.
    """
    itl_s, ttft_s, limit_s, queue_limit_s, long_limit_s = targets
    if step.num_rows == 0:
        found = _timed(table, step, start, _ladder(sizes, 0, most), limit_s)
        length = found.lengths[found.efficient(limit_s)]
        return Pace(length, StepBound.EFFICIENT if length < most else StepBound.MAX_STEP)
    allowed = largest_next_chunk(table, step, start, most, itl_s, sizes)
    if ttft_s is None or allowed >= most:
        return Pace(allowed, StepBound.ITL if allowed < most else StepBound.MAX_STEP)
    allowed = max(allowed, min(most, MIN_PREFILL_TOKENS))
    token_s = table.predict_s(step.with_chunk(start, allowed)) / allowed
    needed_s = token_s * max(demand.backlog, demand.long)
    if demand.tokens_per_s * token_s <= UTILIZATION and needed_s <= ttft_s:
        return Pace(allowed, StepBound.ITL)
    found = _timed(table, step, start, [allowed, *_ladder(sizes, allowed, most)], max(queue_limit_s, long_limit_s))
    return _enough(found, most, targets, ttft_s, demand, token_s * demand.backlog)


def _enough(found: _Sizes, most: int, targets: Targets, ttft_s: float, demand: Demand, queue_s: float) -> Pace:
    """The smallest size for load, backlog and long prompts. `queue_s`: what the backlog takes at the ITL target."""
    itl_s = targets.itl_s
    best, short = found.efficient(targets.limit_s), found.efficient(LOAD_STRETCH * itl_s)
    rate = demand.tokens_per_s
    by_load = max(found.carrying(rate / UTILIZATION, short), found.carrying(rate / HIGH_UTILIZATION, best))
    queued = found.efficient(min(itl_s * sqrt(max(queue_s / ttft_s, 1.0)), targets.queue_limit_s), QUEUE_EFFICIENT)
    by_backlog = found.carrying(demand.backlog / ttft_s, queued)
    by_length = found.holding(demand.long, targets.long_limit_s)
    place = max(by_load, by_backlog, by_length)
    length, seconds = found.lengths[place], found.seconds[place]
    if place == 0:
        bound = StepBound.ITL
    elif length == most:
        bound = StepBound.MAX_STEP
    elif place == by_load:
        bound = StepBound.LOAD if length >= rate * seconds else StepBound.SATURATED
    else:
        bound = StepBound.BACKLOG if place == by_backlog else StepBound.LONG_PROMPT
    return Pace(length, bound, long=place > max(by_load, by_backlog))


def _timed(table: CostTable, step: StepShape, start: int, lengths: Many[int], limit_s: float) -> _Sizes:
    """Times up to the limit; the first length whatever it takes."""
    found = _Sizes([], [])
    for length in lengths:
        seconds = table.predict_s(step.with_chunk(start, length))
        if found.lengths and seconds > limit_s:
            break
        found.lengths.append(length)
        found.seconds.append(seconds)
    return found


def _ladder(sizes: Many[int], above: int, most: int) -> list[int]:
    """Lengths to choose from, ascending: captured sizes, or without any, two in an octave; the last is `most`."""
    if not sizes:
        low = max(above, 1)
        sizes = [length for octave in range(20) for length in ((3 * low << octave) >> 1, low << octave + 1)]
    return [*(size for size in sizes if above < size < most), most]


def largest_next_chunk(
    table: CostTable, shape: StepShape, start: int, most: int, target_s: float, sizes: Many[int] = ()
) -> int:
    """The largest further chunk with which a step of this shape is predicted to take at most `target_s`.

    The first chunk of a step has at least `MIN_PREFILL_TOKENS` (or `most`, if that is less), even if the step then
    takes longer; a further one may have none. Lengths are tried in ascending order: a corrected table need not be
    monotone, and a length beyond one that misses the target is not trusted. Candidates are the captured sizes, or
    without any, doubling lengths followed by a bisection.
    """
    least = 0 if shape.num_chunk_tokens else min(most, MIN_PREFILL_TOKENS)

    def fits(length: int) -> bool:
        return table.predict_s(shape.with_chunk(start, length)) <= target_s

    if sizes:
        lengths = [*(size for size in sizes if least < size < most), most]
        return max(takewhile(fits, lengths), default=least)
    good, bad = least, most + 1
    probe = max(1, least)
    while probe < bad:
        if not fits(probe):
            bad = probe
            break
        good, probe = probe, 2 * probe
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good
