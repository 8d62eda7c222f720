"""`quire bench pacing`: steps sized for the tail, and not, beside each other. Needs no torch."""

import json
from collections.abc import Mapping
from collections.abc import Sequence as Many

from rich.table import Table

from quire.bench.pacing import Outcome, compare, pacings
from quire.bench.percentiles import Percentiles
from quire.bench.regimes import Machine
from quire.cli.console import err, out
from quire.cli.paper_bench import trace_rows
from quire.core.errors import ConfigError
from quire.version import __version__
from quire.workload.arrivals import poisson
from quire.workload.trace import TraceRow

_MACHINE = Machine(num_blocks=50_000, max_model_len=16_384)
_USUAL_RATE = 8.0  # a second


def pacing(workload: str, given: Mapping[str, float | None], itl_target_ms: float | None, as_json: bool) -> None:
    rows = _window(workload, **given)
    ways = pacings(None if itl_target_ms is None else itl_target_ms / 1000)
    outcomes = compare(rows, _MACHINE, ways, lambda text: err.print(text, style="dim"))
    if as_json:
        runs = [_plain(outcome, way.target_s) for outcome, way in zip(outcomes, ways, strict=True)]
        print(json.dumps({"bench": "pacing", "workload": workload, **given, "requests": len(rows), "runs": runs}))
        return
    out.print(f"{len(rows)} requests of {workload}, Llama-3.1-8B on an H200, simulated · quire {__version__}")
    table = Table("target", *(f"{what}, ms: {of}" for what in ("first token", "gaps") for of in ("p50", "p99", "max")),
                  "tokens/s")  # fmt: skip
    for outcome, way in zip(outcomes, ways, strict=True):
        name = outcome.name if way.target_s is None else f"{1000 * way.target_s:.1f} ms, {outcome.name}"
        times = [*_shown(outcome.first_tokens_ms), *_shown(outcome.gaps_ms)]
        table.add_row(name, *times, f"{outcome.tokens_per_s:,.0f}")
    out.print(table)


def _window(
    workload: str, rate: float | None, scale: float | None, skip_s: float | None, seconds: float | None
) -> Many[TraceRow]:
    """The requests that come in so many seconds."""
    assert scale is not None and skip_s is not None and seconds is not None
    rows = trace_rows(workload)
    if rate is not None or rows[-1].arrived_s == 0.0:
        rows = poisson(rows, rate or _USUAL_RATE, seed=0)
    last_s = rows[-1].arrived_s
    rows = [row._replace(arrived_s=(row.arrived_s - skip_s) / scale) for row in rows]
    rows = [row for row in rows if 0 <= row.arrived_s < seconds]
    if not rows:
        raise ConfigError(
            f"No request of {workload} comes within {seconds:g} s after the first {skip_s:g}, at {scale:g} times its "
            f"speed: it has {last_s:.0f} s. Give another --skip, or more --seconds."
        )
    return rows


def _shown(times: Percentiles | None) -> list[str]:
    return ["–"] * 3 if times is None else [f"{time:.1f}" for time in (times.p50, times.p99, times.max)]


def _plain(outcome: Outcome, target_s: float | None) -> dict[str, object]:
    return {
        "name": outcome.name,
        "target_ms": None if target_s is None else 1000 * target_s,
        "first_token_ms": outcome.first_tokens_ms._asdict(),
        "gap_ms": None if outcome.gaps_ms is None else outcome.gaps_ms._asdict(),
        "tokens_per_s": round(outcome.tokens_per_s, 1),
    }
