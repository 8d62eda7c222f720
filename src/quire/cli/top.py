"""`quire top`: requests, tokens and latencies of a server, once a second, from `/metrics`, `/load` and `/engine/state`.

Rates and quantiles are of the time between two samples of the metrics. What the page /engine draws is here in lines of
text, with a sparkline of the last minute where a figure changes.
"""

import json
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families
from rich.live import Live
from rich.table import Table

from quire.cli.console import out
from quire.cli.server_client import ServerClient, first_key
from quire.core.errors import ConfigError, EngineFailed

_PREFIX = "quire_"
_SHARES = (0.5, 0.9, 0.99)


class Bucket(NamedTuple):
    """The number of observations up to a limit, cumulative."""

    limit_s: float
    num_within: float


class MetricsSample(NamedTuple):
    """One metrics page. Samples of one name that differ only in their labels are added up: those of several models."""

    at_s: float
    totals: Mapping[str, float]
    kv_usage: float  # the highest of all models
    buckets: Mapping[str, tuple[Bucket, ...]]  # by histogram, cumulative, the last without a limit
    by_model: Mapping[str, Mapping[str, float]]  # totals of each model, where there are several


class Quantiles(NamedTuple):
    """Quantiles of a latency."""

    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class TopView:
    """The state of a server at the second sample, with rates since the first."""

    engine_up: bool
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_usage: float  # 0 to 1
    num_models_loaded: int | None  # None: the server has one model
    seconds: float  # between the two samples; 0 if there was only one
    generated_tokens_per_s: float
    prompt_tokens_per_s: float
    prefix_hit: float | None  # 0 to 1; None if no prompt was admitted in between
    finished_per_s: float
    refused_per_s: float
    num_preemptions: int
    num_engine_restarts: int  # since the server's start
    time_to_first_token: Quantiles | None
    inter_token_latency: Quantiles | None
    end_to_end: Quantiles | None


def read_page(page: str, at_s: float) -> MetricsSample:
    totals: dict[str, float] = {}
    buckets: dict[str, dict[float, float]] = {}
    by_model: dict[str, dict[str, float]] = {}
    kv_usage = 0.0
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = sample.name.removeprefix(_PREFIX)
                if sample.name.endswith("_bucket"):
                    counts = buckets.setdefault(name.removesuffix("_bucket"), {})
                    limit_s = float(sample.labels["le"])
                    counts[limit_s] = counts.get(limit_s, 0.0) + sample.value
                else:
                    totals[name] = totals.get(name, 0.0) + sample.value
                    if model := sample.labels.get("model"):
                        of_model = by_model.setdefault(model, {})
                        of_model[name] = of_model.get(name, 0.0) + sample.value
                    kv_usage = max(kv_usage, sample.value) if name == "kv_cache_usage_perc" else kv_usage
    except (ValueError, KeyError) as error:
        raise ConfigError("This is not a metrics page. Give the address of a quire server, as it prints it.") from error
    if "engine_up" not in totals:
        raise ConfigError("That page has metrics, but not those of a quire server.")
    ordered = {name: tuple(Bucket(*each) for each in sorted(counts.items())) for name, counts in buckets.items()}
    return MetricsSample(at_s, totals, kv_usage, ordered, by_model)


def compare(before: MetricsSample | None, after: MetricsSample) -> TopView:
    """The state of `after`, with rates and quantiles since `before`; without one, quantiles since the start."""
    seconds = 0.0 if before is None else after.at_s - before.at_s

    def gained(name: str) -> float:
        """The growth of a counter. A counter that fell belongs to a restarted server."""
        now, then = after.totals.get(name, 0.0), 0.0 if before is None else before.totals.get(name, 0.0)
        return now - then if now >= then else now

    def rate(amount: float) -> float:
        return max(amount, 0.0) / seconds if seconds > 0 else 0.0

    def quantiles(name: str) -> Quantiles | None:
        return _quantiles(() if before is None else before.buckets.get(name, ()), after.buckets.get(name, ()))

    queries, hits = gained("prefix_cache_queries_total"), gained("prefix_cache_hits_total")
    prompt = gained("prompt_tokens_total")
    return TopView(
        engine_up=after.totals["engine_up"] > 0,
        num_running=int(after.totals.get("num_requests_running", 0)),
        num_waiting=int(after.totals.get("num_requests_waiting", 0)),
        num_waiting_tokens=int(after.totals.get("num_waiting_tokens", 0)),
        kv_usage=after.kv_usage,
        num_models_loaded=int(after.totals["model_loaded"]) if "model_loaded" in after.totals else None,
        seconds=seconds,
        generated_tokens_per_s=rate(gained("sampled_tokens_total")),
        prompt_tokens_per_s=rate(prompt),
        prefix_hit=hits / queries if queries else None,
        finished_per_s=rate(gained("request_success_total")),
        refused_per_s=rate(gained("requests_refused_total")),
        num_preemptions=int(gained("num_preemptions_total")),
        num_engine_restarts=int(after.totals.get("engine_restarts_total", 0)),
        time_to_first_token=quantiles("time_to_first_token_seconds"),
        inter_token_latency=quantiles("inter_token_latency_seconds"),
        end_to_end=quantiles("e2e_request_latency_seconds"),
    )


def _quantiles(before: tuple[Bucket, ...], after: tuple[Bucket, ...]) -> Quantiles | None:
    """Quantiles of the observations in between; None without any."""
    then = {bucket.limit_s: bucket.num_within for bucket in before}
    gained = [Bucket(bucket.limit_s, bucket.num_within - then.get(bucket.limit_s, 0.0)) for bucket in after]
    if any(bucket.num_within < 0 for bucket in gained):  # the server was restarted
        gained = list(after)
    if not gained or gained[-1].num_within <= 0:
        return None
    return Quantiles(*(_quantile(gained, share) for share in _SHARES))


def _quantile(buckets: list[Bucket], share: float) -> float:
    """As `histogram_quantile` of Prometheus: linear within a bucket, and at most the last finite limit."""
    rank = share * buckets[-1].num_within
    for lower, upper in pairwise([Bucket(0.0, 0.0), *buckets]):
        if upper.num_within >= rank:
            if upper.limit_s == float("inf"):
                return lower.limit_s
            return lower.limit_s + (upper.limit_s - lower.limit_s) * (rank - lower.num_within) / (
                upper.num_within - lower.num_within
            )
    raise AssertionError(buckets)


_BAR_COLUMNS = 20
_SPARK_COLUMNS = 30
_HISTORY = 60  # samples
_LEVELS = "▁▂▃▄▅▆▇█"


class TenantQueue(NamedTuple):
    """How many requests of a priority class and a tenant wait."""

    priority: int
    tenant: str
    num_requests: int


@dataclass(frozen=True, slots=True)
class EngineSummary:
    """The state of the engine, as the page /engine shows it."""

    step: int
    num_blocks: int
    num_held: int
    num_cached: int
    num_evictable: int
    num_host: int
    max_rows: int
    waiting_for: str | None
    queue: tuple[TenantQueue, ...]
    step_seconds: tuple[float, ...]  # of the steps since the last sample, as far as they were recorded

    @property
    def median_step_s(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None


def read_engine(page: str) -> EngineSummary:
    try:
        view = json.loads(page)
        return EngineSummary(
            step=view["step"],
            num_blocks=view["num_blocks"],
            num_held=view["num_blocks"] - view["num_free"] - view["num_evictable"],
            num_cached=view["num_cached"],
            num_evictable=view["num_evictable"],
            num_host=view["num_host"],
            max_rows=view["max_rows"],
            waiting_for=view["waiting_for"],
            queue=tuple(TenantQueue(**each) for each in view["queue"]),
            step_seconds=tuple(float(step["seconds"]) for step in view["steps"]),
        )
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError("/engine/state is not that of this version of quire. Update one of the two.") from error


@dataclass(frozen=True, slots=True)
class ModelView:
    """One of several models."""

    name: str
    status: str  # as in /v1/models
    num_running: int
    num_waiting: int
    num_waiting_for_load: int
    kv_usage: float  # 0 to 1
    generated_tokens_per_s: float


class ModelLoad(NamedTuple):
    """What `/load` says of one of several models."""

    status: str
    num_running: int
    num_waiting: int
    num_waiting_for_load: int


class ServerLoad(NamedTuple):
    """What `/load` says."""

    num_open: int  # HTTP requests without a complete response, running or waiting
    models: Mapping[str, ModelLoad]  # by name, where there are several


_LOAD_FIELDS = ("num_requests_running", "num_requests_waiting", "num_requests_waiting_for_load")


def read_load(page: str) -> ServerLoad:
    """Raises ValueError, TypeError, KeyError or AttributeError for anything else."""
    load = json.loads(page)
    models = {
        name: ModelLoad(str(state["status"]), *(int(state[field]) for field in _LOAD_FIELDS))
        for name, state in load.get("models", {}).items()
    }
    return ServerLoad(int(load.get("server_load", 0)), models)


def view_models(before: MetricsSample | None, after: MetricsSample, load: ServerLoad) -> tuple[ModelView, ...]:
    """Each of several models, with its rate between two samples of the metrics."""

    def sampled(sample: MetricsSample | None, name: str) -> float:
        return 0.0 if sample is None else sample.by_model.get(name, {}).get("sampled_tokens_total", 0.0)

    seconds = 0.0 if before is None else after.at_s - before.at_s
    return tuple(
        ModelView(
            name=name,
            **state._asdict(),
            kv_usage=after.by_model.get(name, {}).get("kv_cache_usage_perc", 0.0),
            generated_tokens_per_s=max(sampled(after, name) - sampled(before, name), 0.0) / seconds if seconds else 0.0,
        )
        for name, state in load.models.items()
    )


class TopSample(NamedTuple):
    """What is shown at one time."""

    view: TopView
    engine: EngineSummary | None  # None: it is down, or there are several
    num_open: int
    models: tuple[ModelView, ...] = ()  # empty: the server has one


class MetricsClient:
    """Reads `/metrics`, `/load` and `/engine/state` of a server."""

    def __init__(self, url: str, key: str | None) -> None:
        self._server = ServerClient(url, key, key_hint="--api-key-file, --api-key or QUIRE_API_KEY")
        self.url = self._server.url
        self._step = -1

    def sample(self, before: MetricsSample | None, after: MetricsSample) -> TopSample:
        """What is shown, of two samples of the metrics."""
        view = compare(before, after)
        engine: EngineSummary | None = None
        if view.engine_up and view.num_models_loaded is None:
            with suppress(EngineFailed):  # it went down in between
                engine = read_engine(self._server.get(f"/engine/state?since={self._step}"))
                self._step = engine.step
        load = self.load()
        return TopSample(view, engine, load.num_open, view_models(before, after, load))

    def read(self) -> MetricsSample:
        page = self._server.get("/metrics")
        return read_page(page, time.monotonic())

    def load(self) -> ServerLoad:
        page = self._server.get("/load")
        try:
            return read_load(page)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f"{self.url}/load is not that of a quire server. Give its address as it prints it."
            ) from error


def top(url: str, key_file: Path | None, key: str | None, *, every_s: float, once: bool, as_json: bool) -> None:
    server = MetricsClient(url, key if key_file is None else first_key(key_file))
    if once:
        before = server.read()
        server.sample(None, before)  # from now on the engine records its steps
        time.sleep(every_s)
        _show(server, server.sample(before, server.read()), as_json)
        return
    try:
        _watch(server, every_s, as_json)
    except KeyboardInterrupt:
        return


def _watch(server: MetricsClient, every_s: float, as_json: bool) -> None:
    before = server.read()
    first = server.sample(None, before)
    history: deque[TopSample] = deque(maxlen=_HISTORY)
    with Live(console=out, auto_refresh=False) if not as_json else nullcontext() as live:
        if live is not None:
            live.update(table(server.url, [first]), refresh=True)
        while True:
            time.sleep(every_s)
            after = server.read()
            history.append(server.sample(before, after))
            before = after
            if live is None:
                _show(server, history[-1], as_json)
            else:
                live.update(table(server.url, history), refresh=True)


def _show(server: MetricsClient, sample: TopSample, as_json: bool) -> None:
    if as_json:
        print(json.dumps(as_object(server.url, sample)), flush=True)
    else:
        out.print(table(server.url, [sample]))


def as_object(url: str, sample: TopSample) -> dict[str, object]:
    """A sample as JSON: quantiles by name, null without observations."""
    fields: dict[str, object] = {"url": url, "num_open": sample.num_open, **asdict(sample.view)}
    for name, value in fields.items():
        if isinstance(value, Quantiles):
            fields[name] = value._asdict()
    fields["models"] = [asdict(model) for model in sample.models]
    if sample.engine is None:
        return {**fields, "engine": None}
    engine = asdict(sample.engine)
    del engine["step_seconds"]
    queue = [each._asdict() for each in sample.engine.queue]
    return {**fields, "engine": {**engine, "queue": queue, "median_step_s": sample.engine.median_step_s}}


def sparkline(values: Iterable[float]) -> str:
    """The last values as a line of bars, from 0 to the largest."""
    shown = list(values)[-_SPARK_COLUMNS:]
    most = max(shown, default=0.0)
    if len(shown) < 2 or most <= 0:
        return ""
    return "".join(_LEVELS[round(max(value, 0.0) / most * (len(_LEVELS) - 1))] for value in shown)


def table(url: str, history: Sequence[TopSample]) -> Table:
    """The last sample, with sparklines of those before it."""
    view, engine, num_open, models = history[-1]
    views = [sample.view for sample in history]
    drawn = Table(box=None, show_header=False, pad_edge=False, title=f"quire · {url}", title_justify="left")
    filled = round(_BAR_COLUMNS * view.kv_usage)
    state = "up" if view.engine_up else "down"
    if view.num_models_loaded is not None:
        state = f"{view.num_models_loaded} loaded"
    drawn.add_row("engine" if view.num_models_loaded is None else "models",
                  f"{state} · {view.num_engine_restarts} restarts")  # fmt: skip
    for model in models:
        drawn.add_row("", _described(model))
    limit, reason, blocks = "", "", ""
    if engine is not None:
        limit = f" of {engine.max_rows}"
        reason = f" for {engine.waiting_for}" if engine.waiting_for and view.num_waiting else ""
        host = f" · {engine.num_host:,} on the host" if engine.num_host else ""
        blocks = f" · {engine.num_held:,} of {engine.num_blocks:,} blocks held · {engine.num_cached:,} cached{host}"
    drawn.add_row("requests", f"{view.num_running} running{limit} · {view.num_waiting} waiting{reason} "
                  f"({view.num_waiting_tokens:,} tokens) · {num_open} open",
                  sparkline(each.num_running + each.num_waiting for each in views))  # fmt: skip
    if engine is not None and engine.queue:
        drawn.add_row("queue", " · ".join(f"class {each.priority} {each.tenant or '–'}: {each.num_requests}"
                                          for each in engine.queue))  # fmt: skip
    drawn.add_row("kv cache", f"{'█' * filled}{'░' * (_BAR_COLUMNS - filled)} {100 * view.kv_usage:.0f} %{blocks}"
                  f" · {view.num_preemptions} preempted", sparkline(each.kv_usage for each in views))  # fmt: skip
    hits = "–" if view.prefix_hit is None else f"{100 * view.prefix_hit:.0f} %"
    drawn.add_row("tokens", f"{view.generated_tokens_per_s:,.1f} generated/s · "
                  f"{view.prompt_tokens_per_s:,.0f} prompt/s · prefix hit {hits}",
                  sparkline(each.generated_tokens_per_s for each in views))  # fmt: skip
    drawn.add_row("answers", f"{view.finished_per_s:,.1f}/s · {view.refused_per_s:,.1f} refused/s")
    if engine is not None:
        step = "–" if engine.median_step_s is None else f"median {1000 * engine.median_step_s:,.1f} ms"
        steps = [each for sample in history if sample.engine is not None for each in sample.engine.step_seconds]
        drawn.add_row("step", step, sparkline(steps))
    for name, chosen in _LATENCIES.items():
        quantiles = [getattr(each, chosen) for each in views]
        drawn.add_row(name, _milliseconds(quantiles[-1]), sparkline(each.p50_s if each else 0.0 for each in quantiles))
    return drawn


def _described(model: ModelView) -> str:
    loading = f" · {model.num_waiting_for_load} waiting for its load" if model.num_waiting_for_load else ""
    if model.status != "loaded":
        return f"{model.name}: {model.status}{loading}"
    return (
        f"{model.name}: {model.num_running} running · {model.num_waiting} waiting{loading} · kv "
        f"{100 * model.kv_usage:.0f} % · {model.generated_tokens_per_s:,.1f} generated/s"
    )


_LATENCIES = {
    "first token": "time_to_first_token",
    "next token": "inter_token_latency",
    "whole": "end_to_end",
}


def _milliseconds(quantiles: Quantiles | None) -> str:
    if quantiles is None:
        return "–"
    names = ("p50", "p90", "p99")
    return " · ".join(f"{name} {1000 * seconds:,.0f} ms" for name, seconds in zip(names, quantiles, strict=True))
