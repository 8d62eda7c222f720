"""What planning costs: microseconds of `plan` and `absorb` together, by running rows and waiting requests.

Conditions: prefix cache on, the pool full of cached blocks, so that every new block costs an eviction; rows cruise with
their block boundaries spread evenly; one step in flight. In the steady line nobody comes or goes; in the other, one row
of a hundred finishes in each step and another request takes its place. Only `plan` and `absorb` are timed, in CPU time
of the thread: a busy machine does not count. A figure is the lower quartile over rounds of the mean over a round's
steps, so that what happens once in many steps is in it. All configurations take turns, round by round.

Curves over a logarithmic axis, as SVG for a file and as bars for a terminal. Knows numbers and names alone.
"""

import statistics
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from math import ceil, log2
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from quire.bench.environment import InstructionCounter
from quire.core.ids import IntArray, RequestId
from quire.core.process import gc_undisturbed
from quire.core.request import Request
from quire.core.sampling import RowSampling
from quire.kv.manager import KVManager
from quire.sched.scheduler import Scheduler
from quire.sim.runners import BulkRunner, FinishedStep

ROWS = (16, 64, 256, 1024, 4096)
WAITING = (0, 100, 10_000, 100_000)
TURNOVERS = (0.0, 0.01)
ROUND = 64  # timed steps
WARM = 32  # untimed steps at the beginning of a round: the other settings' data is in the processor's caches
_BLOCK = 16
_PROMPT = 64  # tokens, and up to a block more
_CACHED = 512  # tokens of a text that lies in the cache when the measurement begins
_LIFE = 100  # steps of a row where there is turnover
_VOCAB_SIZE = 1 << 15


class PlanningSetting(NamedTuple):
    rows: int
    waiting: int
    turnover: float


@dataclass(slots=True)
class PlanningCost:
    """What one setting cost, round by round."""

    setting: PlanningSetting
    us: list[float] = field(default_factory=list)
    instructions: list[float] = field(default_factory=list)  # none where the machine does not count them

    @property
    def quartile_us(self) -> float:
        """A quarter of the rounds took no longer: what neighbours add to caches and memory comes and goes."""
        return float(np.quantile(self.us, 0.25, method="inverted_cdf"))

    @property
    def median_instructions(self) -> float | None:
        return statistics.median(self.instructions) if self.instructions else None


def measure(
    rows: Many[int] = ROWS,
    waiting: Many[int] = WAITING,
    *,
    rounds: int = 9,
    seed: int = 0,
    say: Callable[[str], None] = lambda text: None,
) -> list[PlanningCost]:
    """A line for every setting. They are built first and then measured in turns."""
    settings = [PlanningSetting(some, many, share) for some in rows for share in TURNOVERS for many in waiting]
    prompts, meter = RandomPrompts(seed), InstructionCounter()
    stands = []
    for setting in settings:
        say(f"building {setting.rows} rows, {setting.waiting} waiting, {setting.turnover:.0%} turnover")
        stands.append(PlanningBench(setting, prompts, meter, num_steps=(rounds + 1) * (ROUND + WARM)))
    lines = [PlanningCost(setting) for setting in settings]
    with gc_undisturbed():  # as in an engine's process
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}")
            for stand, line in zip(stands, lines, strict=True):
                stand.round()
                if number > 0:
                    line.us.append(meter.ns / 1000 / ROUND)
                    line.instructions.extend([meter.instructions / ROUND] if meter.counts else [])
    meter.close()
    return lines


class RandomPrompts:
    """Random prompts that share nothing; the same for everybody who asks in the same order."""

    def __init__(self, seed: int) -> None:
        self._dice = np.random.default_rng(seed)
        self._drawn: list[IntArray] = []

    def __iter__(self) -> Iterator[IntArray]:
        number = 0
        while True:
            while number >= len(self._drawn):
                matrix = self._dice.integers(1, _VOCAB_SIZE, (4096, _PROMPT + _BLOCK), dtype=np.int32)
                self._drawn.extend(line[: _PROMPT + i % _BLOCK] for i, line in enumerate(matrix))
            yield self._drawn[number]
            number += 1


class PlanningBench:
    """A scheduler in one setting, ready to be measured."""

    def __init__(
        self, setting: PlanningSetting, prompts: RandomPrompts, meter: InstructionCounter, num_steps: int
    ) -> None:
        self._prompts = iter(prompts)
        self._num_requests = 0
        self._turnover = setting.turnover > 0
        life = _LIFE if self._turnover else num_steps + 2 * _BLOCK
        per_row = (_PROMPT + _BLOCK + life) // _BLOCK + 1
        num_blocks = setting.rows * 2 * per_row + 8 * per_row
        self.scheduler = Scheduler(
            KVManager(num_blocks, _BLOCK, setting.rows),
            max_rows=setting.rows,
            max_step_tokens=setting.rows + 16_384,
        )
        self._body = BulkRunner(setting.rows)
        self._flying: deque[FinishedStep] = deque()
        self._meter = meter
        self._settled = False  # from then on, whoever finishes is replaced
        self._fill()
        for number in range(setting.rows):
            self._add(1 + _LIFE * (number + 1) // setting.rows if self._turnover else life)
        while self.scheduler.num_queued:
            self._turn()
        num_gone = setting.rows - len(self.scheduler.groups())  # while others still sat down
        for number in range(num_gone):
            self._add(1 + _LIFE * (number + 1) // num_gone)
        for _ in range(setting.waiting):
            self._add(_LIFE)
        self._settled = True
        for _ in range(_LIFE // 2 if self._turnover else _BLOCK):
            self._turn()
        while self.scheduler.num_queued < setting.waiting:
            self._add(_LIFE)
        assert self.scheduler.kv.pool.num_free < 64, setting

    def _fill(self) -> None:
        """Requests that leave the whole pool cached."""
        pool, dice = self.scheduler.kv.pool, np.random.default_rng(0)
        while pool.num_free > _CACHED // _BLOCK:
            for _ in range(max(1, min(self.scheduler.max_rows, pool.num_free * _BLOCK // _CACHED))):
                self._add(1, dice.integers(1, _VOCAB_SIZE, _CACHED, dtype=np.int32))
            while not self.scheduler.idle:
                self._turn()

    def _add(self, num_output: int, prompt: IntArray | None = None) -> None:
        prompt = next(self._prompts) if prompt is None else prompt
        self.scheduler.add(Request(RequestId(self._num_requests), prompt, num_output, RowSampling()))
        self._num_requests += 1

    def round(self) -> None:
        """The meter says what it cost."""
        for _ in range(WARM):
            self._turn()
        self._meter.clear()
        for _ in range(ROUND):
            self._turn()

    def _turn(self) -> None:
        """One step with one in flight, as on a device. Whoever finishes is replaced."""
        meter = self._meter
        meter.start()
        plan = self.scheduler.plan()
        meter.stop()
        if plan is not None:
            self._flying.append(self._body.launch(plan))
        if not self._flying or (plan is not None and len(self._flying) <= 1):
            return
        result = self._flying.popleft().wait()
        meter.start()
        absorbed = self.scheduler.absorb(result)
        meter.stop()
        for _ in absorbed.finished if self._settled else ():
            self._add(_LIFE)


_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 210, 40, 50
_COLOURS = ("#1b6ca8", "#d1495b", "#3c8d5a", "#8d5ab0", "#c98b2b", "#4a4a4a", "#23a0a0", "#a02370")
_FONT = 'font-family="sans-serif" font-size="12"'


class Point(NamedTuple):
    x: float
    y: float


class Curve(NamedTuple):
    name: str
    points: tuple[Point, ...]
    dashed: bool = False


def svg(title: str, x_name: str, y_name: str, curves: Many[Curve]) -> str:
    """A picture with its own axes and legend; x doubles from mark to mark, y starts at 0."""
    points = [point for curve in curves for point in curve.points]
    assert points and min(point.x for point in points) > 0, "nothing to draw"
    low, high = log2(min(point.x for point in points)), log2(max(point.x for point in points))
    top = _round_up(max(point.y for point in points))

    def place(point: Point) -> tuple[float, float]:
        share = (log2(point.x) - low) / (high - low) if high > low else 0.5
        return (
            _LEFT + share * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - point.y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 24, title, weight="bold"),
        _text((_WIDTH - _RIGHT) / 2, _HEIGHT - 10, x_name),
        _text(8, _TOP - 8, y_name),
    ]
    for mark in range(5):
        x, y = place(Point(2**low, top * mark / 4))
        parts.append(f'<line x1="{x}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(8, y + 4, f"{top * mark / 4:g}"))
    for value in sorted({point.x for point in points}):
        x, y = place(Point(value, 0))
        parts.append(_text(x - 12, y + 18, f"{value:g}"))
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, curve.points))
        dash = ' stroke-dasharray="5 3"' if curve.dashed else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(_text(_WIDTH - _RIGHT + 14, _TOP + 18 * number, curve.name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def bars(curves: Many[Curve], width: int = 50) -> list[str]:
    """One line for each point, as long as its value."""
    most = max(point.y for curve in curves for point in curve.points)
    label = max(len(curve.name) for curve in curves)
    return [
        f"{curve.name:<{label}} {point.x:>6g} {'█' * max(1, round(point.y / most * width))} {point.y:,.0f}"
        for curve in curves
        for point in curve.points
    ]


def _text(x: float, y: float, words: str, *, colour: str = "#222", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}" font-weight="{weight}" {_FONT}>{escape(words)}</text>'


def _round_up(value: float) -> float:
    """The next number with two digits."""
    unit = 10.0 ** (len(str(int(max(value, 1)))) - 1) / 10
    return ceil(value / unit) * unit
