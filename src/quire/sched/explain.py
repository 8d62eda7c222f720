"""A request's own story, for people: what it waited for, what it found, who took its seat, and what that cost.

Reads the events of a family and the history of the queue; decides nothing. Times are step numbers: an engine's step
is what it can count exactly.

What kept the head of the queue out, step by step, and who sat down meanwhile. Bounded; costs the same at any size.

Those behind the head wait for what the head waits for. Whoever is seated although somebody came earlier has
overtaken it, by class, share, lane or deadline.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.events import EventKind, RequestEvent, WaitCause
from quire.core.ids import RequestId
from quire.core.request import RequestGroup

MOST = 4096  # changes, and seatings, that are remembered; arbitrary, never tuned


class WaitInterval(NamedTuple):
    """The steps [start, stop), in which the head of the queue was kept out by one cause; by none: nobody waited."""

    start: int
    stop: int
    cause: WaitCause | None


class RowAssignment(NamedTuple):
    """Somebody sat down. Families are numbered as they arrive."""

    step: int
    order: int
    request: RequestId


class WaitHistory:
    """The latest history of a queue."""

    __slots__ = ("_changes", "_seated")

    def __init__(self, most: int = MOST) -> None:
        self._changes: deque[tuple[int, WaitCause | None]] = deque(maxlen=most)  # from which step on, what
        self._seated: deque[tuple[int, int, RequestId]] = deque(maxlen=most)  # as in `Seated`, which few ever ask for

    def note(self, step: int, cause: WaitCause | None) -> None:
        """How a plan ended for the head. A step that was not taken is noted again, and the last note counts."""
        changes = self._changes
        if changes and changes[-1][0] == step:
            changes.pop()
        if not changes or changes[-1][1] is not cause:
            changes.append((step, cause))

    def note_seated(self, step: int, order: int, request: RequestId) -> None:
        self._seated.append((step, order, request))

    def between(self, start: int, stop: int) -> tuple[WaitInterval, ...]:
        """The steps [start, stop) by cause, in order. What is forgotten is left out."""
        changes = list(self._changes)
        stretches = []
        first = max(bisect_right(changes, start, key=lambda change: change[0]) - 1, 0)
        for number in range(first, len(changes)):
            begins, cause = changes[number]
            ends = changes[number + 1][0] if number + 1 < len(changes) else stop
            if begins >= stop:
                break
            if (kept := WaitInterval(max(begins, start), min(ends, stop), cause)).start < kept.stop:
                stretches.append(kept)
        return tuple(stretches)

    def overtakers(self, order: int, start: int, stop: int) -> tuple[RowAssignment, ...]:
        """Those who came later and sat down in the steps [start, stop)."""
        return tuple(RowAssignment(*each) for each in self._seated if start <= each[0] < stop and each[1] > order)


_WORDS = {
    WaitCause.ORDER: "others came first, by class, share, lane or deadline",
    WaitCause.BUDGET: "the steps' tokens were spent",
    WaitCause.ROWS: "every row was taken",
    WaitCause.BLOCKS: "the KV cache had no room",
    WaitCause.PRESSURE: "running rows needed blocks: nobody was admitted",
    WaitCause.PREFIX: "another was computing the same prefix",
    None: "steps in flight had to come back first",
}


class Wait(NamedTuple):
    """The steps [start, stop), and what it waited for in them; None: for steps in flight. `others`: because of whom."""

    start: int
    stop: int
    cause: WaitCause | None
    others: tuple[RequestId, ...] = ()


class RowStarted(NamedTuple):
    """It sat down in this step, with so many tokens from the cache."""

    step: int
    num_found: int


class Interruption(NamedTuple):
    """It had to get up. By nobody: a step was lost. `num_lost` is None as long as it has not come back."""

    step: int
    by: RequestId | None
    num_computed: int
    num_lost: int | None  # what had to be computed again


class Shortfall(NamedTuple):
    """Tokens of the prompt that the cache did not have when it first sat down, and why the first of them was not."""

    num_tokens: int
    why: str
    evicted_for: RequestId | None


class Fork(NamedTuple):
    """The prompt's tokens, or a beam's, came to be shared by several."""

    step: int
    num_shared: int
    with_whom: str


class Finish(NamedTuple):
    step: int
    reasons: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """All of it, in order within each kind."""

    request: RequestId
    num_prompt: int
    arrived_step: int
    waits: tuple[Wait, ...]
    sittings: tuple[RowStarted, ...]
    shortfall: Shortfall | None
    interruptions: tuple[Interruption, ...]
    forks: tuple[Fork, ...]
    first_token_step: int | None
    ending: Finish | None

    def waited(self, cause: WaitCause | None) -> int:
        """The steps it spent waiting for one thing."""
        return sum(wait.stop - wait.start for wait in self.waits if wait.cause is cause)

    def lines(self) -> tuple[str, ...]:
        """For people: one line for each thing that happened, by step."""
        told = [(self.arrived_step, 0, f"request {self.request} arrived with {_tokens(self.num_prompt)}")]
        told += [(wait.start, 1, _say_wait(wait)) for wait in self.waits]
        told += [(sat.step, 2, f"sat down; {_tokens(sat.num_found)} were in the cache") for sat in self.sittings]
        if self.shortfall is not None and self.sittings:
            told.append((self.sittings[0].step, 3, _say_shortfall(self.shortfall)))
        told += [(fork.step, 4, f"shared {_tokens(fork.num_shared)} with {fork.with_whom}") for fork in self.forks]
        if self.first_token_step is not None:
            told.append((self.first_token_step, 5, "its first token came"))
        told += [(each.step, 0, _say_interruption(each)) for each in self.interruptions]
        if self.ending is not None:
            told.append((self.ending.step, 9, f"ended: {self.ending.reasons}"))
        return tuple(f"step {step}: {words}" for step, _, words in sorted(told))


def explain(group: RequestGroup, stalls: WaitHistory, now_step: int) -> Explanation:
    """The story so far; `now_step` is the step that the next plan is for."""
    events = group.events
    arrived = next(event for event in events if event.what is EventKind.ARRIVED)
    missed = next((event for event in events if event.what is EventKind.MISSED), None)
    ended = next((event for event in events if event.what is EventKind.FINISHED), None)
    return Explanation(
        request=group.request.id,
        num_prompt=arrived.tokens,
        arrived_step=arrived.step,
        waits=tuple(wait for spell in _spells(events, now_step) for wait in _waits(group.order, spell, stalls)),
        sittings=tuple(RowStarted(event.step, event.tokens) for event in events if event.what is EventKind.ADMITTED),
        shortfall=None if missed is None else Shortfall(missed.tokens, missed.detail, missed.other),
        interruptions=tuple(_interruptions(events)),
        forks=tuple(Fork(event.step, event.tokens, event.detail) for event in events if event.what is EventKind.FORKED),
        first_token_step=next((event.step for event in events if event.what is EventKind.FIRST_TOKEN), None),
        ending=None if ended is None else Finish(ended.step, ended.detail),
    )


class _Spell(NamedTuple):
    """The steps [start, stop) in which a family did not sit, and what was noted of it meanwhile."""

    start: int
    stop: int
    noted: tuple[RequestEvent, ...]


def _spells(events: Iterable[RequestEvent], now_step: int) -> list[_Spell]:
    spells = []
    start: int | None = None
    noted: list[RequestEvent] = []
    for event in events:
        if event.what in (EventKind.ARRIVED, EventKind.PREEMPTED):
            start, noted = event.step, []
        elif event.what is EventKind.WAITED:
            noted.append(event)
        elif event.what in (EventKind.ADMITTED, EventKind.FINISHED) and start is not None:
            spells.append(_Spell(start, max(event.step, start), tuple(noted)))
            start = None
    if start is not None:
        spells.append(_Spell(start, max(now_step, start), tuple(noted)))
    return spells


def _waits(order: int, spell: _Spell, stalls: WaitHistory) -> list[Wait]:
    """Its own notes where it waited for a prefix; else what kept the head of the queue out."""
    waits: list[Wait] = []
    start = spell.start
    for number, event in enumerate(spell.noted):
        if event.cause is WaitCause.PREFIX:
            waits += _queued(order, start, event.step, stalls)
            later = spell.noted[number + 1 :]
            start = later[0].step if later else spell.stop
            others = () if event.other is None else (event.other,)
            waits.append(Wait(event.step, start, WaitCause.PREFIX, others))
    waits += _queued(order, start, spell.stop, stalls)
    return [wait for wait in waits if wait.start < wait.stop]


def _queued(order: int, start: int, stop: int, stalls: WaitHistory) -> list[Wait]:
    """By what kept the head out; from the first who overtook it to the last, it was the order."""
    overtakers = stalls.overtakers(order, start, stop)
    if not overtakers:
        return [Wait(*stretch) for stretch in stalls.between(start, stop)]
    first, last = overtakers[0].step, overtakers[-1].step + 1
    others = tuple(dict.fromkeys(assigned.request for assigned in overtakers))
    before = [Wait(*stretch) for stretch in stalls.between(start, first)]
    after = [Wait(*stretch) for stretch in stalls.between(last, stop)]
    return [*before, Wait(first, last, WaitCause.ORDER, others), *after]


def _interruptions(events: list[RequestEvent]) -> Iterable[Interruption]:
    for number, event in enumerate(events):
        if event.what is EventKind.PREEMPTED:
            back = next((later for later in events[number + 1 :] if later.what is EventKind.ADMITTED), None)
            num_lost = None if back is None else max(event.tokens - back.tokens, 0)
            yield Interruption(event.step, event.other, event.tokens, num_lost)


# In words.


def _tokens(count: int) -> str:
    return "1 token" if count == 1 else f"{count} tokens"


def _named(requests: tuple[RequestId, ...]) -> str:
    if not requests:
        return ""
    shown = ", ".join(str(request) for request in requests[:5])
    more = f" and {len(requests) - 5} more" if len(requests) > 5 else ""
    return f" (request{'s' if len(requests) > 1 else ''} {shown}{more})"


def _say_wait(wait: Wait) -> str:
    steps = wait.stop - wait.start
    return f"waited {steps} step{'s' if steps > 1 else ''}: {_WORDS[wait.cause]}{_named(wait.others)}"


def _say_shortfall(shortfall: Shortfall) -> str:
    room = "" if shortfall.evicted_for is None else f", to make room for request {shortfall.evicted_for}"
    return f"{_tokens(shortfall.num_tokens)} had to be computed: {shortfall.why}{room}"


def _say_interruption(each: Interruption) -> str:
    who = "its steps were lost" if each.by is None else f"request {each.by} took its seat"
    lost = "it has not come back yet" if each.num_lost is None else f"{_tokens(each.num_lost)} were lost"
    return f"{who}: {_tokens(each.num_computed)} had been computed, {lost}"
