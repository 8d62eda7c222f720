"""Explains one request: what it waited for, what the cache held, what preempted it, and what that cost.

Reads the events of a request group and the wait history of the queue; decides nothing. Times are step numbers: they
are exact.

`WaitHistory` records what kept the head of the queue out, step by step, and which groups were admitted. It is bounded
and costs the same at any queue length. Groups behind the head wait for what the head waits for. A group admitted before
an earlier one has overtaken it, by class, share, lane or deadline.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from quire.core.ids import RequestId
from quire.core.request import EventKind, RequestEvent, RequestGroup, WaitCause
from quire.sched.pacing import StepBound

Value = TypeVar("Value")

MAX_KEPT = 4096  # changes, and admissions; arbitrary, never tuned


class WaitInterval(NamedTuple):
    """The steps [start, stop), in which one cause kept the queue head from admission; None: no group waited."""

    start: int
    stop: int
    cause: WaitCause | None


class RowAssignment(NamedTuple):
    """A group was admitted. `order` numbers groups by arrival."""

    step: int
    order: int
    request: RequestId


class WaitHistory:
    """The latest history of a queue."""

    __slots__ = ("_admitted", "_bounds", "_changes")

    def __init__(self, max_kept: int = MAX_KEPT) -> None:
        self._changes: deque[tuple[int, WaitCause | None]] = deque(maxlen=max_kept)  # from which step on, what
        self._bounds: deque[tuple[int, StepBound | None]] = deque(maxlen=max_kept)  # from which step on, what
        self._admitted: deque[tuple[int, int, RequestId]] = deque(maxlen=max_kept)  # the fields of `RowAssignment`

    def note(self, step: int, cause: WaitCause | None) -> None:
        """Why the queue head was not admitted. A step that was not taken is noted again; the last note counts."""
        _note_change(self._changes, step, cause)

    def note_bound(self, step: int, bound: StepBound | None) -> None:
        """What limited the prompt tokens of a step; None: nothing did."""
        _note_change(self._bounds, step, bound)

    def note_admitted(self, step: int, order: int, request: RequestId) -> None:
        self._admitted.append((step, order, request))

    def between(self, start: int, stop: int) -> tuple[WaitInterval, ...]:
        """The steps [start, stop) by cause, in order; without steps that are no longer kept."""
        return tuple([WaitInterval(*interval) for interval in _intervals(self._changes, start, stop)])

    def bounds(self, start: int, stop: int) -> dict[StepBound, int]:
        """The number of steps in [start, stop) that each bound limited, the most frequent first."""
        counts: dict[StepBound, int] = {}
        for begins, ends, bound in _intervals(self._bounds, start, stop):
            if bound is not None:
                counts[bound] = counts.get(bound, 0) + ends - begins
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def overtakers(self, order: int, start: int, stop: int) -> tuple[RowAssignment, ...]:
        """Groups that arrived later and were admitted in the steps [start, stop)."""
        return tuple(RowAssignment(*each) for each in self._admitted if start <= each[0] < stop and each[1] > order)


def _note_change(changes: "deque[tuple[int, Value]]", step: int, value: Value) -> None:
    """A step that was not taken is noted again; the last note counts."""
    if changes and changes[-1][0] == step:
        changes.pop()
    if not changes or changes[-1][1] is not value:
        changes.append((step, value))


def _intervals(noted: "deque[tuple[int, Value]]", start: int, stop: int) -> list[tuple[int, int, Value]]:
    changes = list(noted)
    intervals = []
    first = max(bisect_right(changes, start, key=lambda change: change[0]) - 1, 0)
    for number in range(first, len(changes)):
        begins, value = changes[number]
        ends = changes[number + 1][0] if number + 1 < len(changes) else stop
        if begins >= stop:
            break
        if max(begins, start) < min(ends, stop):
            intervals.append((max(begins, start), min(ends, stop), value))
    return intervals


_BOUND_TEXT = {
    StepBound.ITL: "the ITL target",
    StepBound.LOAD: "the offered load",
    StepBound.BACKLOG: "waiting prompts",
    StepBound.LONG_PROMPT: "a long prompt",
    StepBound.SATURATED: "more load than steps of any size carry",
    StepBound.EFFICIENT: "the efficient size",
    StepBound.MAX_STEP: "the largest step",
}

_CAUSE_TEXT = {
    WaitCause.ORDER: "others came first, by class, share, lane or deadline",
    WaitCause.BUDGET: "the token budget of the steps was used up",
    WaitCause.ROWS: "every row was assigned",
    WaitCause.BLOCKS: "the KV cache had too few free blocks",
    WaitCause.PRESSURE: "running rows needed blocks, so no request was admitted",
    WaitCause.PREFIX: "another request was computing the same prefix",
    None: "steps in flight had to finish first",
}


class Wait(NamedTuple):
    """The steps [start, stop) and what it waited for; None: steps in flight. `others`: the requests waited for."""

    start: int
    stop: int
    cause: WaitCause | None
    others: tuple[RequestId, ...] = ()


class RowStarted(NamedTuple):
    """Admitted in this step, with this many cached tokens."""

    step: int
    num_found: int


class Interruption(NamedTuple):
    """Preempted. `by` is None if a step was lost; `num_lost` is None until the request is admitted again."""

    step: int
    by: RequestId | None
    num_computed: int
    num_lost: int | None  # recomputed tokens


class Shortfall(NamedTuple):
    """Prompt tokens missing in the cache at the first admission, and why the first of them was missing."""

    num_tokens: int
    why: str
    evicted_for: RequestId | None


class Transfer(NamedTuple):
    """The prompt was sent to a prefill engine: tokens copied from there, or why the prompt was computed here."""

    step: int
    num_tokens: int
    failure: str


class Fork(NamedTuple):
    """Several sequences share the tokens of the prompt, or of a beam."""

    step: int
    num_shared: int
    shared_with: str


class Finish(NamedTuple):
    step: int
    reasons: str


class SlowSteps(NamedTuple):
    """Steps since the admission that waited for the host: launched kernel by kernel, or with a graph to capture."""

    num_steps: int
    host_s: float


NO_SLOW_STEPS = SlowSteps(0, 0.0)


@dataclass(frozen=True, slots=True)
class Explanation:
    """All events of a request, in order within each kind."""

    request: RequestId
    num_prompt: int
    arrived_step: int
    waits: tuple[Wait, ...]
    admissions: tuple[RowStarted, ...]
    shortfall: Shortfall | None
    interruptions: tuple[Interruption, ...]
    forks: tuple[Fork, ...]
    first_token_step: int | None
    paced_by: tuple[tuple[StepBound, int], ...]  # what sized the steps from the first admission to the first token
    ending: Finish | None
    slow_steps: SlowSteps = NO_SLOW_STEPS
    num_drafted: int = 0  # drafts verified
    num_accepted: int = 0
    drafts_by: tuple[tuple[str, int, int], ...] = ()  # drafter, drafts, tokens gained
    routing: str = ""  # why its prompt went to a prefill engine, or did not
    transfer: Transfer | None = None

    def running_steps(self, now_step: int) -> range:
        """From the first admission to the end, or to `now_step`."""
        start = self.admissions[0].step if self.admissions else now_step
        return range(start, now_step if self.ending is None else self.ending.step)

    def waited(self, cause: WaitCause | None) -> int:
        """The steps it waited for one cause."""
        return sum(wait.stop - wait.start for wait in self.waits if wait.cause is cause)

    def lines(self) -> tuple[str, ...]:
        """One line of text per event, by step."""
        lines = [(self.arrived_step, 0, f"request {self.request} arrived with {_tokens(self.num_prompt)}")]
        if self.routing:
            lines.append((self.arrived_step, 1, self.routing))
        if self.transfer is not None:
            lines.append((self.transfer.step, 1, _transfer_text(self.transfer)))
        lines += [(wait.start, 1, _wait_text(wait)) for wait in self.waits]
        lines += [
            (start.step, 2, f"admitted with {_tokens(start.num_found)} from the cache") for start in self.admissions
        ]
        if self.shortfall is not None and self.admissions:
            lines.append((self.admissions[0].step, 3, _shortfall_text(self.shortfall)))
        lines += [(fork.step, 4, f"shared {_tokens(fork.num_shared)} with {fork.shared_with}") for fork in self.forks]
        if self.first_token_step is not None:
            lines.append((self.first_token_step, 5, "emitted its first token" + _pace_text(self.paced_by)))
        lines += [(each.step, 0, _interruption_text(each)) for each in self.interruptions]
        if self.slow_steps.num_steps:
            lines.append((self.admissions[0].step, 6, _slow_text(self.slow_steps)))
        if self.num_drafted:
            words = f"from here on gained {_tokens(self.num_accepted)} by {self.num_drafted} drafts"
            if any(name != "unknown" for name, _, _ in self.drafts_by):
                words += f" ({', '.join(f'{name} {gained} of {drafted}' for name, drafted, gained in self.drafts_by)})"
            lines.append((self.admissions[0].step, 7, words))
        if self.ending is not None:
            lines.append((self.ending.step, 9, f"finished: {self.ending.reasons}"))
        return tuple(f"step {step}: {words}" for step, _, words in sorted(lines))


def explain(group: RequestGroup, wait_history: WaitHistory, now_step: int) -> Explanation:
    """The events so far; `now_step` is the step of the next plan."""
    events = group.events
    arrived = next(event for event in events if event.what is EventKind.ARRIVED)
    missed = next((event for event in events if event.what is EventKind.MISSED), None)
    ended = next((event for event in events if event.what is EventKind.FINISHED), None)
    copied = next((event for event in events if event.what is EventKind.TRANSFERRED), None)
    routed = next((event.detail for event in events if event.what is EventKind.ROUTED), "")
    admitted = next((event.step for event in events if event.what is EventKind.ADMITTED), None)
    first_step = next((event.step for event in events if event.what is EventKind.FIRST_TOKEN), None)
    paced = {} if admitted is None or first_step is None else wait_history.bounds(admitted, first_step + 1)
    return Explanation(
        request=group.request.id,
        num_prompt=arrived.tokens,
        arrived_step=arrived.step,
        waits=tuple(
            wait for period in _wait_periods(events, now_step) for wait in _waits(group.order, period, wait_history)
        ),
        admissions=tuple(RowStarted(event.step, event.tokens) for event in events if event.what is EventKind.ADMITTED),
        shortfall=None if missed is None else Shortfall(missed.tokens, missed.detail, missed.other),
        interruptions=tuple(_interruptions(events)),
        forks=tuple(Fork(event.step, event.tokens, event.detail) for event in events if event.what is EventKind.FORKED),
        first_token_step=first_step,
        paced_by=tuple(paced.items()),
        ending=None if ended is None else Finish(ended.step, ended.detail),
        num_drafted=group.num_drafted,
        num_accepted=group.num_accepted,
        drafts_by=tuple((name, *counts) for name, counts in sorted(group.drafts_by.items())),
        routing=routed,
        transfer=None if copied is None else Transfer(copied.step, copied.tokens, copied.detail),
    )


class _WaitPeriod(NamedTuple):
    """The steps [start, stop) in which a group had no row, and the waits noted in them."""

    start: int
    stop: int
    noted: tuple[RequestEvent, ...]


def _wait_periods(events: Iterable[RequestEvent], now_step: int) -> list[_WaitPeriod]:
    periods = []
    start: int | None = None
    noted: list[RequestEvent] = []
    for event in events:
        if event.what in (EventKind.ARRIVED, EventKind.PREEMPTED):
            start, noted = event.step, []
        elif event.what is EventKind.WAITED:
            noted.append(event)
        elif event.what in (EventKind.ADMITTED, EventKind.FINISHED) and start is not None:
            periods.append(_WaitPeriod(start, max(event.step, start), tuple(noted)))
            start = None
    if start is not None:
        periods.append(_WaitPeriod(start, max(now_step, start), tuple(noted)))
    return periods


def _waits(order: int, period: _WaitPeriod, wait_history: WaitHistory) -> list[Wait]:
    """Waits for an in-flight prefix by its own events; else what kept the head of the queue out."""
    waits: list[Wait] = []
    start = period.start
    for number, event in enumerate(period.noted):
        if event.cause is WaitCause.PREFIX:
            waits += _queued(order, start, event.step, wait_history)
            later = period.noted[number + 1 :]
            start = later[0].step if later else period.stop
            others = () if event.other is None else (event.other,)
            waits.append(Wait(event.step, start, WaitCause.PREFIX, others))
    waits += _queued(order, start, period.stop, wait_history)
    return [wait for wait in waits if wait.start < wait.stop]


def _queued(order: int, start: int, stop: int, wait_history: WaitHistory) -> list[Wait]:
    """What kept the head out; from the first overtaking group to the last, the order."""
    overtakers = wait_history.overtakers(order, start, stop)
    if not overtakers:
        return [Wait(*interval) for interval in wait_history.between(start, stop)]
    first, last = overtakers[0].step, overtakers[-1].step + 1
    others = tuple(dict.fromkeys(assigned.request for assigned in overtakers))
    before = [Wait(*interval) for interval in wait_history.between(start, first)]
    after = [Wait(*interval) for interval in wait_history.between(last, stop)]
    return [*before, Wait(first, last, WaitCause.ORDER, others), *after]


def _interruptions(events: list[RequestEvent]) -> Iterable[Interruption]:
    for number, event in enumerate(events):
        if event.what is EventKind.PREEMPTED:
            back = next((later for later in events[number + 1 :] if later.what is EventKind.ADMITTED), None)
            num_lost = None if back is None else max(event.tokens - back.tokens, 0)
            yield Interruption(event.step, event.other, event.tokens, num_lost)


# Text.


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _request_list(requests: tuple[RequestId, ...]) -> str:
    if not requests:
        return ""
    shown = ", ".join(str(request) for request in requests[:5])
    more = f" and {len(requests) - 5} more" if len(requests) > 5 else ""
    return f" (request{'s' if len(requests) > 1 else ''} {shown}{more})"


def _wait_text(wait: Wait) -> str:
    steps = wait.stop - wait.start
    return f"waited {steps} step{'s' if steps > 1 else ''}: {_CAUSE_TEXT[wait.cause]}{_request_list(wait.others)}"


def _pace_text(paced_by: tuple[tuple[StepBound, int], ...]) -> str:
    if not paced_by:
        return ""
    counts = ", ".join(f"{_BOUND_TEXT[bound]} ({count})" for bound, count in paced_by)
    return f"; its steps had the size of {counts}"


def _slow_text(slow: SlowSteps) -> str:
    count = f"{slow.num_steps} step{'s' if slow.num_steps > 1 else ''}"
    return f"from here on {count} took {1e3 * slow.host_s:.0f} ms of the host, eager or to capture a CUDA graph"


def _shortfall_text(shortfall: Shortfall) -> str:
    evictor = "" if shortfall.evicted_for is None else f" for request {shortfall.evicted_for}"
    return f"{_tokens(shortfall.num_tokens)} were not cached: {shortfall.why}{evictor}"


def _transfer_text(transfer: Transfer) -> str:
    if transfer.failure:
        return f"the prompt is computed here, and not copied from a prefill engine: {transfer.failure}"
    return f"{_tokens(transfer.num_tokens)} were computed by a prefill engine and copied"


def _interruption_text(each: Interruption) -> str:
    cause = "its steps were lost" if each.by is None else f"preempted by request {each.by}"
    lost = "not admitted again yet" if each.num_lost is None else f"{_tokens(each.num_lost)} recomputed"
    return f"{cause}: {_tokens(each.num_computed)} had been computed, {lost}"
