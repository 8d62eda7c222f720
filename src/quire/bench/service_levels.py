"""Latencies of a served load: percentiles, service levels, goodput and capacity. Does not depend on who served it.

Everything follows from one record per request. TTFT: from sending a request to its first token. ITL: gap per token; a
chunk of k tokens after a gap g counts as k gaps of g / k. TPOT: time from the first to the last token by the tokens
after the first. E2E: from sending to the last token. Goodput: requests per second that meet a level.
"""

import json
import re
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from quire.core.errors import ConfigError, shown

ATTAINMENT = 0.99  # share of the requests that must meet a level


class Percentiles(NamedTuple):
    """Percentiles in milliseconds, by nearest rank: each is a measured value."""

    p50: float
    p90: float
    p99: float
    max: float


def percentiles_ms(seconds: Many[float]) -> Percentiles | None:
    if not len(seconds):
        return None
    found = np.quantile(np.asarray(seconds) * 1000, (0.5, 0.9, 0.99, 1.0), method="inverted_cdf")
    return Percentiles(*(round(float(value), 4) for value in found))


class TokenArrival(NamedTuple):
    """Tokens that arrived together."""

    at_s: float
    num_tokens: int


class ServedRequest(NamedTuple):
    """One request of a load. Times are since the start of the load."""

    number: int
    scheduled_s: float
    sent_s: float
    num_prompt: int  # tokens
    num_output: int  # tokens asked for
    arrivals: tuple[TokenArrival, ...] = ()
    ended_s: float | None = None
    num_cached: int | None = None  # prompt tokens from the prefix cache; None: the server did not say
    error: str | None = None

    @property
    def served(self) -> bool:
        return self.error is None and bool(self.arrivals)

    @property
    def num_received(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0].at_s - self.sent_s

    @property
    def e2e_s(self) -> float:
        return self.arrivals[-1].at_s - self.sent_s

    @property
    def tpot_s(self) -> float | None:
        """None with a single token."""
        if self.num_received < 2:
            return None
        return (self.arrivals[-1].at_s - self.arrivals[0].at_s) / (self.num_received - 1)

    def gaps_s(self) -> list[float]:
        gaps, last_s = [], self.arrivals[0].at_s
        for at_s, count in self.arrivals[1:]:
            gaps += [(at_s - last_s) / count] * count
            last_s = at_s
        return gaps


class ServiceLevel(NamedTuple):
    """Limits of a request, in milliseconds."""

    ttft_ms: float
    tpot_ms: float

    def __str__(self) -> str:
        return f"{self.ttft_ms:g}/{self.tpot_ms:g}"

    def is_met_by(self, record: ServedRequest) -> bool:
        if not record.served:
            return False
        return 1000 * record.ttft_s <= self.ttft_ms and 1000 * (record.tpot_s or 0.0) <= self.tpot_ms


INTERACTIVE, SERVER = ServiceLevel(500, 30), ServiceLevel(2000, 100)  # of the industry's benchmark, MLPerf inference
_LEVEL = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,6})?)/([0-9]{1,9}(?:\.[0-9]{1,6})?)")


def parse_level(text: str) -> ServiceLevel:
    found = _LEVEL.fullmatch(text.strip())
    if found is None or min(map(float, found.groups())) <= 0:
        raise ConfigError(
            f"{shown(text)} is not a service level; it is written as TTFT/TPOT in milliseconds, such as 500/30."
        )
    return ServiceLevel(float(found[1]), float(found[2]))


def attainment(records: Many[ServedRequest], level: ServiceLevel) -> float:
    """The share of the requests that meet a level; failed ones do not."""
    return sum(level.is_met_by(record) for record in records) / len(records)


class LevelViolations(NamedTuple):
    """The requests of a load that did not meet a level."""

    requests: int
    of: int
    failed: int
    late: int  # first tokens
    slow: int  # by TPOT
    latest_ms: float | None  # TTFT of those served
    slowest_ms: float | None  # TPOT of those served
    too_long: int | None  # tokens: all prompts of this length and more were late, and a shorter one was not

    def reason(self) -> str:
        parts = [
            f"{self.failed} failed" * (self.failed > 0),
            f"{self.late} had their first token late, after up to {self.latest_ms or 0:,.0f} ms" * (self.late > 0),
            f"{self.slow} had their tokens late, up to {self.slowest_ms or 0:,.1f} ms apart" * (self.slow > 0),
        ]
        text = f"{self.requests} of {self.of} requests missed it at the lowest rate: {'; '.join(filter(None, parts))}."
        if self.too_long is None:
            return text
        without = f"without them: --max-prompt {self.too_long - 1}."
        return f"{text} So did all prompts of {self.too_long:,} tokens and more; {without}"


def violations(records: Many[ServedRequest], level: ServiceLevel) -> LevelViolations:
    misses = [record for record in records if not level.is_met_by(record)]
    served = [record for record in misses if record.served]
    late = [record for record in served if 1000 * record.ttft_s > level.ttft_ms]
    slow = [record for record in served if 1000 * (record.tpot_s or 0.0) > level.tpot_ms]
    longest = max([each.num_prompt for each in records if each.served and each not in late], default=None)
    beyond = [record.num_prompt for record in late if longest is not None and record.num_prompt > longest]
    return LevelViolations(
        len(misses),
        len(records),
        failed=len(misses) - len(served),
        late=len(late),
        slow=len(slow),
        latest_ms=max([round(1000 * record.ttft_s, 4) for record in late], default=None),
        slowest_ms=max([round(1000 * (record.tpot_s or 0.0), 4) for record in slow], default=None),
        too_long=min(beyond, default=None),
    )


class LoadSummary(NamedTuple):
    """The figures of one load."""

    requests: int
    failed: int
    short: int  # served with fewer tokens than asked for
    seconds: float  # from the first scheduled request to the last token
    requests_per_s: float  # sent, over the time in which requests were sent
    prompt_tokens: int
    cached_tokens: int | None
    output_tokens: int
    output_tokens_per_s: float
    late_ms: Percentiles | None  # sent after their scheduled time: the client's own delay
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    tpot_ms: Percentiles | None
    e2e_ms: Percentiles | None
    errors: tuple[str, ...]  # the first few different ones


_SHOWN_ERRORS = 3


def summarize(records: Many[ServedRequest]) -> LoadSummary:
    assert records, "a load without requests"
    served = [record for record in records if record.served]
    num_output = sum(record.num_received for record in served)
    seconds = max([record.arrivals[-1].at_s for record in served], default=0.0) - records[0].scheduled_s
    sending_s = max(record.sent_s for record in records) - records[0].scheduled_s
    cached = [record.num_cached for record in served if record.num_cached is not None]
    tpots_s = [tpot_s for record in served if (tpot_s := record.tpot_s) is not None]
    errors = dict.fromkeys(record.error or "no token" for record in records if not record.served)
    return LoadSummary(
        requests=len(records),
        failed=len(records) - len(served),
        short=sum(record.num_received < record.num_output for record in served),
        seconds=seconds,
        requests_per_s=len(records) / sending_s if sending_s > 0 else float(len(records)),
        prompt_tokens=sum(record.num_prompt for record in records),
        cached_tokens=sum(cached) if cached else None,
        output_tokens=num_output,
        output_tokens_per_s=num_output / seconds if seconds > 0 else 0.0,
        late_ms=percentiles_ms([max(record.sent_s - record.scheduled_s, 0.0) for record in records]),
        ttft_ms=percentiles_ms([record.ttft_s for record in served]),
        itl_ms=percentiles_ms([gap_s for record in served for gap_s in record.gaps_s()]),
        tpot_ms=percentiles_ms(tpots_s),
        e2e_ms=percentiles_ms([record.e2e_s for record in served]),
        errors=tuple(errors)[:_SHOWN_ERRORS],
    )


def plain(summary: LoadSummary, records: Many[ServedRequest], levels: Iterable[ServiceLevel]) -> dict[str, object]:
    """The figures as plain data, with goodput at each level."""
    figures = {
        name: value._asdict() if isinstance(value, Percentiles) else value for name, value in summary._asdict().items()
    }
    figures["levels"] = [
        {
            "level": str(level),
            "met_share": round(met := attainment(records, level), 4),
            "goodput_per_s": round(met * summary.requests_per_s, 4),
        }
        for level in levels
    ]
    return figures


def event_lines(facts: dict[str, object], records: Iterable[ServedRequest]) -> str:
    """The raw events as JSON lines: the facts of the run, then one request per line."""
    lines = [json.dumps(facts)]
    for record in records:
        arrivals = [[round(arrival.at_s, 6), arrival.num_tokens] for arrival in record.arrivals]
        lines.append(json.dumps({**record._asdict(), "sent_s": round(record.sent_s, 6), "arrivals": arrivals}))
    return "\n".join(lines) + "\n"


_PLOTTED = (1.0, 1.25, 1.6, 2.0, 2.5, 3.3, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


class PlotPoint(NamedTuple):
    """x is 1 / (1 - quantile): 2 is p50, 10 p90, 100 p99."""

    x: float
    y_ms: float


def percentile_curves(records: Many[ServedRequest]) -> dict[str, list[PlotPoint]]:
    """TTFT, ITL and TPOT by percentile, as far as there are values."""
    served = [record for record in records if record.served]
    values = {
        "TTFT": [record.ttft_s for record in served],
        "ITL": [gap_s for record in served for gap_s in record.gaps_s()],
        "TPOT": [tpot_s for record in served if (tpot_s := record.tpot_s) is not None],
    }
    return {name: _curve(values_s) for name, values_s in values.items() if values_s}


def _curve(values_s: Many[float]) -> list[PlotPoint]:
    places = [place for place in _PLOTTED if place <= len(values_s)]
    found = np.quantile(np.asarray(values_s) * 1000, [1 - 1 / place for place in places], method="inverted_cdf")
    return [PlotPoint(place, float(value)) for place, value in zip(places, found, strict=True)]


class CapacityProbe(NamedTuple):
    """One load at a factor on the arrival rate."""

    scale: float
    requests_per_s: float
    met_share: float

    @property
    def holds(self) -> bool:
        return self.met_share >= ATTAINMENT


MAX_PROBES = 24
_DOUBLINGS = 10  # a factor of 1,024 up or down from the first probe


def find_capacity(
    probe: Callable[[float], CapacityProbe | None],
    first: float,
    tolerance: float,
    factor: float = 2.0,
    lowest: float = 0.0,
) -> list[CapacityProbe]:
    """Loads up to the highest rate that holds the level: doubled or halved until one holds and one does not, then
    bisected until these two differ by less than `tolerance`. The highest that holds is the capacity. With a smaller
    `factor`, the first step away from the first rate is that; each further one is its square.

    The search ends where `lowest` does not hold, or a probe is None: a rate so low that it sends nothing new."""
    probes: list[CapacityProbe] = []
    low: float | None = None
    high: float | None = None
    scale = first
    while len(probes) < MAX_PROBES and (made := probe(scale)) is not None:
        probes.append(made)
        if made.holds:
            low = scale
        else:
            high = scale
        if low is not None and high is not None:
            if high <= (1 + tolerance) * low:
                break
            scale = (low * high) ** 0.5
        elif len(probes) > _DOUBLINGS or (not made.holds and scale <= lowest):
            break
        else:
            scale = max(scale * (factor if made.holds else 1 / factor), lowest)
            factor = min(factor * factor, 2.0)
    return probes
