"""CPU time of the scheduler: microseconds of `plan` and `absorb` per step, by running rows and waiting requests.

Conditions: prefix caching on; the pool is full of cached blocks, so that every new block costs an eviction; all rows
decode, with their block boundaries spread evenly; one step in flight. In the steady setting no request starts or
finishes; with turnover, one row of a hundred finishes in each step and another request takes its row. Only `plan` and
`absorb` are timed, in CPU time of the thread, so that other programs do not count. A figure is the lower quartile over
rounds of the mean over the steps of a round, so that rare events are included. Settings are
interleaved, round by round. On Linux with access to hardware counters, instructions of the thread are counted too.

Plots are curves over a logarithmic axis: SVG for a file, bars for a terminal.
"""

import ctypes
import os
import platform
import statistics
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from math import ceil, log2
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

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
WARM = 32  # untimed steps before a round: the CPU caches hold the data of other settings
_BLOCK = 16
_PROMPT = 64  # tokens, plus up to one block
_CACHED = 512  # tokens of each text in the prefix cache before the measurement
_LIFE = 100  # steps of a request with turnover
_VOCAB_SIZE = 1 << 15

_SYSCALLS = {"x86_64": 298, "aarch64": 241}  # perf_event_open
_ATTRIBUTE_BYTES = 128
_INSTRUCTIONS = 1  # PERF_COUNT_HW_INSTRUCTIONS of PERF_TYPE_HARDWARE
_USER_ONLY = (1 << 5) | (1 << 6)  # exclude the kernel and the hypervisor


class InstructionCounter:
    """Sums CPU nanoseconds and instructions between `start` and `stop`."""

    __slots__ = ("_counter", "_started_instructions", "_started_ns", "instructions", "ns")

    def __init__(self) -> None:
        self._counter = _open_counter()
        self._started_ns = 0
        self._started_instructions = 0
        self.ns = 0
        self.instructions = 0

    @property
    def counts(self) -> bool:
        """Whether instructions are counted."""
        return self._counter is not None

    def clear(self) -> None:
        self.ns = self.instructions = 0

    def start(self) -> None:
        if self._counter is not None:
            self._started_instructions = _read_counter(self._counter)
        self._started_ns = time.thread_time_ns()

    def stop(self) -> None:
        self.ns += time.thread_time_ns() - self._started_ns
        if self._counter is not None:
            self.instructions += _read_counter(self._counter) - self._started_instructions

    def close(self) -> None:
        if self._counter is not None:
            os.close(self._counter)
            self._counter = None


def _open_counter() -> int | None:
    """The descriptor of a perf event that counts this thread's instructions; None without access to it."""
    number = _SYSCALLS.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return None
    attribute = struct.pack("=IIQ", 0, _ATTRIBUTE_BYTES, _INSTRUCTIONS).ljust(40, b"\0") + struct.pack("=Q", _USER_ONLY)
    buffer = ctypes.create_string_buffer(attribute, _ATTRIBUTE_BYTES)
    counter = ctypes.CDLL(None).syscall(number, buffer, 0, -1, -1, 0)
    return counter if counter >= 0 else None


def _read_counter(counter: int) -> int:
    return int.from_bytes(os.read(counter, 8), "little")


class PlanningSetting(NamedTuple):
    rows: int
    waiting: int
    turnover: float


@dataclass(slots=True)
class PlanningCost:
    """The cost of one setting, round by round."""

    setting: PlanningSetting
    us: list[float] = field(default_factory=list)
    instructions: list[float] = field(default_factory=list)  # empty where they are not counted

    @property
    def quartile_us(self) -> float:
        """The lower quartile of the rounds: disturbance by other programs is not in every round."""
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
    """The cost of every setting. All are built first, then measured interleaved."""
    settings = [PlanningSetting(some, many, share) for some in rows for share in TURNOVERS for many in waiting]
    prompts, counter = RandomPrompts(seed), InstructionCounter()
    benches = []
    for setting in settings:
        say(f"building {setting.rows} rows, {setting.waiting} waiting, {setting.turnover:.0%} turnover")
        benches.append(PlanningBench(setting, prompts, counter, num_steps=(rounds + 1) * (ROUND + WARM)))
    lines = [PlanningCost(setting) for setting in settings]
    with gc_undisturbed():  # as in the engine process
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}")
            for bench, line in zip(benches, lines, strict=True):
                bench.round()
                if number > 0:
                    line.us.append(counter.ns / 1000 / ROUND)
                    line.instructions.extend([counter.instructions / ROUND] if counter.counts else [])
    counter.close()
    return lines


class RandomPrompts:
    """Random prompts without shared prefixes: the same sequence for every setting."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)
        self._drawn: list[IntArray] = []

    def __iter__(self) -> Iterator[IntArray]:
        number = 0
        while True:
            while number >= len(self._drawn):
                matrix = self._generator.integers(1, _VOCAB_SIZE, (4096, _PROMPT + _BLOCK), dtype=np.int32)
                self._drawn.extend(line[: _PROMPT + i % _BLOCK] for i, line in enumerate(matrix))
            yield self._drawn[number]
            number += 1


class PlanningBench:
    """A scheduler in one setting, ready to be measured."""

    def __init__(
        self, setting: PlanningSetting, prompts: RandomPrompts, counter: InstructionCounter, num_steps: int
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
        self._runner = BulkRunner(setting.rows)
        self._in_flight: deque[FinishedStep] = deque()
        self._counter = counter
        self._settled = False  # if so, a finished request is replaced
        self._fill()
        for number in range(setting.rows):
            self._add(1 + _LIFE * (number + 1) // setting.rows if self._turnover else life)
        while self.scheduler.num_queued:
            self._step()
        num_gone = setting.rows - len(self.scheduler.groups())  # finished while others were still admitted
        for number in range(num_gone):
            self._add(1 + _LIFE * (number + 1) // num_gone)
        for _ in range(setting.waiting):
            self._add(_LIFE)
        self._settled = True
        for _ in range(_LIFE // 2 if self._turnover else _BLOCK):
            self._step()
        while self.scheduler.num_queued < setting.waiting:
            self._add(_LIFE)
        assert self.scheduler.kv.pool.num_free < 64, setting

    def _fill(self) -> None:
        """Run requests until the whole pool is cached."""
        pool, dice = self.scheduler.kv.pool, np.random.default_rng(0)
        while pool.num_free > _CACHED // _BLOCK:
            for _ in range(max(1, min(self.scheduler.max_rows, pool.num_free * _BLOCK // _CACHED))):
                self._add(1, dice.integers(1, _VOCAB_SIZE, _CACHED, dtype=np.int32))
            while not self.scheduler.idle:
                self._step()

    def _add(self, num_output: int, prompt: IntArray | None = None) -> None:
        prompt = next(self._prompts) if prompt is None else prompt
        self.scheduler.add(Request(RequestId(self._num_requests), prompt, num_output, RowSampling()))
        self._num_requests += 1

    def round(self) -> None:
        """A round of steps; the counter holds its cost."""
        for _ in range(WARM):
            self._step()
        self._counter.clear()
        for _ in range(ROUND):
            self._step()

    def _step(self) -> None:
        """One step with one in flight, as on a device. A finished request is replaced."""
        counter = self._counter
        counter.start()
        plan = self.scheduler.plan()
        counter.stop()
        if plan is not None:
            self._in_flight.append(self._runner.launch(plan))
        if not self._in_flight or (plan is not None and len(self._in_flight) <= 1):
            return
        result = self._in_flight.popleft().wait()
        counter.start()
        absorbed = self.scheduler.absorb(result)
        counter.stop()
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


def svg(title: str, x_name: str, y_name: str, *panels: Many[Curve]) -> str:
    """A plot with axes and a legend; several panels below each other. x is logarithmic, y starts at 0."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT * len(panels)}">',
        '<rect width="100%" height="100%" fill="white"/>',
        _text(_LEFT, 24, title, weight="bold"),
    ]
    for number, curves in enumerate(panels):
        parts += _panel(_HEIGHT * number, x_name, y_name, curves)
    return "\n".join([*parts, "</svg>", ""])


def _panel(offset: int, x_name: str, y_name: str, curves: Many[Curve]) -> list[str]:
    """The parts of one panel, this far from the top of the picture."""
    points = [point for curve in curves for point in curve.points]
    assert points and min(point.x for point in points) > 0, "nothing to draw"
    low, high = log2(min(point.x for point in points)), log2(max(point.x for point in points))
    top = _round_up(max(point.y for point in points))

    def position(point: Point) -> tuple[float, float]:
        share = (log2(point.x) - low) / (high - low) if high > low else 0.5
        return (
            _LEFT + share * (_WIDTH - _LEFT - _RIGHT),
            offset + _HEIGHT - _BOTTOM - point.y / top * (_HEIGHT - _TOP - _BOTTOM),
        )

    parts = [
        _text((_WIDTH - _RIGHT) / 2, offset + _HEIGHT - 10, x_name),
        _text(8, offset + _TOP - 8, y_name),
    ]
    for mark in range(5):
        x, y = position(Point(2**low, top * mark / 4))
        parts.append(f'<line x1="{x}" y1="{y}" x2="{_WIDTH - _RIGHT}" y2="{y}" stroke="#ddd"/>')
        parts.append(_text(8, y + 4, f"{top * mark / 4:g}"))
    for value in sorted({point.x for point in points}):
        x, y = position(Point(value, 0))
        parts.append(_text(x - 12, y + 18, f"{value:g}"))
    for number, curve in enumerate(curves):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(position, curve.points))
        dash = ' stroke-dasharray="5 3"' if curve.dashed else ""
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>')
        parts.append(_text(_WIDTH - _RIGHT + 14, offset + _TOP + 18 * number, curve.name, colour=colour))
    return parts


def bars(curves: Many[Curve], width: int = 50) -> list[str]:
    """One line per point; its length is its value."""
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
    """The next number with two significant digits."""
    unit = 10.0 ** (len(str(int(max(value, 1)))) - 1) / 10
    return ceil(value / unit) * unit
