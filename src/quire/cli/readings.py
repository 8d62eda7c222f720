"""What a server's metrics page says, and what happened between two readings of it. Fetches and draws nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from quire.core.errors import ConfigError

_PREFIX = "quire_"
_SHARES = (0.5, 0.9, 0.99)


class Bucket(NamedTuple):
    """How many observations were at most so large."""

    limit_s: float
    num_within: float


class Reading(NamedTuple):
    """One metrics page. Samples of one name that differ only in their labels are added up."""

    at_s: float
    totals: Mapping[str, float]
    buckets: Mapping[str, tuple[Bucket, ...]]  # by histogram, cumulative, the last without a limit


class Quantiles(NamedTuple):
    """Below which time half, nine tenths and 99 of 100 stayed."""

    p50_s: float
    p90_s: float
    p99_s: float


@dataclass(frozen=True, slots=True)
class View:
    """What a server is doing: its state at the second reading, rates since the first."""

    engine_up: bool
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    kv_usage: float  # 0 to 1
    seconds: float  # between the two readings; 0 if there was but one
    generated_tokens_per_s: float
    prompt_tokens_per_s: float
    prefix_hit: float | None  # 0 to 1; None if no prompt was seated meanwhile
    finished_per_s: float
    refused_per_s: float
    num_preemptions: int
    num_engine_restarts: int  # since the server's start
    time_to_first_token: Quantiles | None
    inter_token_latency: Quantiles | None
    end_to_end: Quantiles | None


def read_page(page: str, at_s: float) -> Reading:
    totals: dict[str, float] = {}
    buckets: dict[str, list[Bucket]] = {}
    try:
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                name = sample.name.removeprefix(_PREFIX)
                if sample.name.endswith("_bucket"):
                    limit_s = float(sample.labels["le"])
                    buckets.setdefault(name.removesuffix("_bucket"), []).append(Bucket(limit_s, sample.value))
                else:
                    totals[name] = totals.get(name, 0.0) + sample.value
    except (ValueError, KeyError) as error:
        raise ConfigError("That is no page of metrics. Give the address of a quire server, as it was told.") from error
    if "engine_up" not in totals:
        raise ConfigError("That page has metrics, but not those of a quire server.")
    return Reading(at_s, totals, {name: tuple(sorted(several)) for name, several in buckets.items()})


def compare(before: Reading | None, after: Reading) -> View:
    """What `after` says, with rates and quantiles since `before`; without one, quantiles of all there ever was."""
    seconds = 0.0 if before is None else after.at_s - before.at_s

    def gained(name: str) -> float:
        """How much a counter grew; a counter that fell is one of a server started anew."""
        now, then = after.totals.get(name, 0.0), 0.0 if before is None else before.totals.get(name, 0.0)
        return now - then if now >= then else now

    def rate(amount: float) -> float:
        return max(amount, 0.0) / seconds if seconds > 0 else 0.0

    def quantiles(name: str) -> Quantiles | None:
        return _quantiles(() if before is None else before.buckets.get(name, ()), after.buckets.get(name, ()))

    asked, found = gained("prefix_cache_queries_total"), gained("prefix_cache_hits_total")
    prompt = gained("prompt_tokens_total")
    return View(
        engine_up=after.totals["engine_up"] > 0,
        num_running=int(after.totals.get("num_requests_running", 0)),
        num_waiting=int(after.totals.get("num_requests_waiting", 0)),
        num_waiting_tokens=int(after.totals.get("num_waiting_tokens", 0)),
        kv_usage=after.totals.get("kv_cache_usage_perc", 0.0),
        seconds=seconds,
        generated_tokens_per_s=rate(gained("sampled_tokens_total")),
        prompt_tokens_per_s=rate(prompt),
        prefix_hit=found / asked if asked else None,
        finished_per_s=rate(gained("request_success_total")),
        refused_per_s=rate(gained("requests_refused_total")),
        num_preemptions=int(gained("num_preemptions_total")),
        num_engine_restarts=int(after.totals.get("engine_restarts_total", 0)),
        time_to_first_token=quantiles("time_to_first_token_seconds"),
        inter_token_latency=quantiles("inter_token_latency_seconds"),
        end_to_end=quantiles("e2e_request_latency_seconds"),
    )


def _quantiles(before: tuple[Bucket, ...], after: tuple[Bucket, ...]) -> Quantiles | None:
    """Of what came between; None if nothing did."""
    then = {bucket.limit_s: bucket.num_within for bucket in before}
    gained = [Bucket(bucket.limit_s, bucket.num_within - then.get(bucket.limit_s, 0.0)) for bucket in after]
    if any(bucket.num_within < 0 for bucket in gained):  # the server was started anew
        gained = list(after)
    if not gained or gained[-1].num_within <= 0:
        return None
    return Quantiles(*(_quantile(gained, share) for share in _SHARES))


def _quantile(buckets: list[Bucket], share: float) -> float:
    """As Prometheus does: even within a bucket; what lies beyond the last limit is told as that limit."""
    rank = share * buckets[-1].num_within
    for lower, upper in pairwise([Bucket(0.0, 0.0), *buckets]):
        if upper.num_within >= rank:
            if upper.limit_s == float("inf"):
                return lower.limit_s
            return lower.limit_s + (upper.limit_s - lower.limit_s) * (rank - lower.num_within) / (
                upper.num_within - lower.num_within
            )
    raise AssertionError(buckets)
