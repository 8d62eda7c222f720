"""Prometheus metrics: counters and histograms of finished requests, gauges from the engine's last heartbeat.

Metrics that vLLM has are also written under vLLM's names. Labels come from closed sets. A restarted engine counts from
zero; the totals of earlier engines are added, so that counters never decrease.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from quire.core.sampling import SamplingParams
from quire.core.speculative import DRAFTERS
from quire.core.step import FinishReason
from quire.engine.outputs import Delta, RequestOutput
from quire.engine.prefix_transfer import TransferFailure
from quire.engine.request_state import RequestState
from quire.engine.stats import EngineInfo, EngineStats, MemoryUsage
from quire.sched.pacing import StepBound
from quire.sched.speculation import MAX_DRAFTS
from quire.server.async_engine import FinishedRequest
from quire.server.http.request_context import RequestRecord
from quire.server.prefill_decode import SplitRequest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0,
            7.5, 10.0, 15.0, 20.0, 30.0, 45.0, 60.0)  # fmt: skip
_TOKENS = tuple(2**power for power in range(18))
_CONTINUATIONS = tuple(2**power for power in range(8))
_REASONS = frozenset(reason.value for reason in FinishReason)
_BOUNDS = tuple(bound.value for bound in StepBound)
_COUNTED = ("prompt_tokens", "cached_tokens", "recomputed_tokens", "computed_tokens", "sampled_tokens", "preemptions",
            "forks", "moved_blocks", "lost_steps", "replayed_steps", "eager_steps", "eager_s", "capture_s",
            "drafted_tokens", "accepted_tokens", *(f"accepted_at_{place}" for place in range(1, MAX_DRAFTS + 1)),
            *(f"{kind}_by_{name}" for kind in ("drafted", "accepted") for name in DRAFTERS),
            *(f"steps_{bound}" for bound in _BOUNDS))  # fmt: skip

# Of the event loop's time, pages may take this share, and so much at once. A page takes some milliseconds.
_PAGE_SHARE, _PAGE_BURST_S = 0.2, 0.1

# Refusals and failures by code: a closed set, since the values of a label are kept for ever.
_CODES = frozenset(
    {"queue_full", "share_exhausted", "draining", "engine_unavailable", "engine_lost", "deadline_expired", "never_fits",
     "context_length_exceeded", "numerical_error", "engine_failed", "invalid_parameter", "invalid_prompt",
     "invalid_grammar", "nothing_left", "unsupported_schema", "compilers_busy", "request_timeout", "too_many_bodies",
     "template_worker_lost", "slow_reader", "tokenizer_busy", "too_many_streams", "model_not_found",
     "model_unavailable"}
)  # fmt: skip


disable_created_metrics()  # type: ignore[no-untyped-call]  # start times of series: unused


class MetricsSource(Protocol):
    """What a page is made of."""

    def collect(self) -> Iterable[Metric]: ...


class Metrics:
    """The metrics of one server."""

    def __init__(
        self, stats: Callable[[], EngineStats | None], clock: Callable[[], float], model_name: str = ""
    ) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._last_delta_s: dict[int, float] = {}  # by continuation: (request number << 8) + index
        self._page = b""  # the last one
        self._page_at_s = clock()
        self._page_time_left_s = _PAGE_BURST_S
        self.engine = EngineGauges(stats)
        self.registry.register(self.engine)
        self._vllm = VllmMetrics(model_name, lambda: self.engine.info())

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"quire_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"quire_{name}", text, buckets=buckets, registry=self.registry)

        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.successes = counter("request_success", "Finished requests, by finish reason.", "finished_reason")
        self.refusals = counter("requests_refused", "Requests rejected or failed, by error code.", "code")
        self.moved = counter("requests_moved", "Requests that a lost engine had, begun again by another.")
        self.left = counter("requests_left", "Requests whose client disconnected.")
        self.slow_readers = counter("slow_readers", "Responses cut because the client did not read them.", "reason")
        self.first_token = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self.between = Distribution("inter_token_latency_seconds", "Between two tokens of one sequence.", _SECONDS)
        self.registry.register(self.between)
        self.per_token = histogram("time_per_output_token_seconds", "Mean time per token after the first, by request.")
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self.queue = histogram("request_queue_time_seconds", "From arrival to admission.")
        self.prefill = histogram("request_prefill_time_seconds", "From admission to the first token.")
        self.decode = histogram("request_decode_time_seconds", "From the first token to the last.")
        self.inference = histogram("request_inference_time_seconds", "From admission to the last token.")
        self.prompt_length = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_length = histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self.longest_output = histogram(
            "request_max_num_generation_tokens", "Generated tokens of the longest continuation of a request.", _TOKENS
        )
        self.computed_prompt = histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", _TOKENS
        )
        self.params_n = histogram("request_params_n", "Continuations that a request asks for.", _CONTINUATIONS)
        self.params_max_tokens = histogram("request_params_max_tokens", "max_tokens of requests that set it.", _TOKENS)
        self.stored = Gauge("quire_stored_responses", "Responses kept by the Responses API.", registry=self.registry)
        self.stored_bytes = Gauge("quire_stored_response_bytes", "Memory they take.", registry=self.registry)
        self.split = counter("requests_split", "Requests whose prompt was sent to a prefill engine.")
        self.transferred = counter("kv_transfer_bytes", "KV blocks copied from prefill engines, in bytes.")
        self.not_transferred = counter(
            "requests_prefill_fallback", "Of the split requests, those that computed their prompt again.", "reason"
        )
        for failure in TransferFailure:
            self.not_transferred.labels(failure.value)
        self.http = counter("http_requests", "HTTP responses.", "route", "method", "status")
        for reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.successes.labels(reason.value)

    def page(self, source: "MetricsSource | None" = None) -> bytes:
        """The page as it is now; under a flood of requests for it the last one, some ten ms old. A source has the
        metrics of several models, instead of these."""
        now_s = self._clock()
        earned_s = _PAGE_SHARE * max(now_s - self._page_at_s, 0.0)
        self._page_time_left_s = min(self._page_time_left_s + earned_s, _PAGE_BURST_S)
        self._page_at_s = now_s
        if not self._page or self._page_time_left_s > 0:
            self._page = generate_latest(source or self)
            self._page_time_left_s -= self._clock() - now_s
        return self._page

    def collect(self) -> Iterator[Metric]:
        families = list(self.registry.collect())
        yield from families
        yield from self._vllm.aliases(families)

    def progressed(self, delta: Delta, state: RequestState) -> None:
        """A continuation gained tokens."""
        now_s = self._clock()
        key = (state.number << 8) + delta.index
        before_s = self._last_delta_s.get(key)
        self._last_delta_s[key] = now_s
        if before_s is not None and delta.token_ids:
            self.between.observe((now_s - before_s) / len(delta.token_ids))

    def finished(self, end: FinishedRequest) -> None:
        self._forget(end.state)
        if end.output is not None:
            self._note_output(end.output)
            self._note_params(end.state.params)
        elif end.failure is not None:
            self._refused(end.failure.code)
        else:
            self.left.inc()

    def note_move(self, lost: RequestState) -> None:
        """Another engine begins a request again; what it had generated is lost."""
        self._forget(lost)
        self.moved.inc()

    def _forget(self, state: RequestState) -> None:
        for sequence in state.sequences:
            self._last_delta_s.pop((state.number << 8) + sequence.index, None)
        self.generation_tokens.inc(sum(len(sequence.token_ids) for sequence in state.sequences))

    def responded(self, record: RequestRecord) -> None:
        """An HTTP request has ended."""
        self.http.labels(record.route, record.method, str(record.status)).inc()
        if record.refused_early:  # failures in the engine are counted by `finished`
            self._refused(record.error_code)

    def slow_reader(self, reason: str) -> None:
        """A response was cut: `stalled`, `connections` (unread bytes of all), `stream` or `all_streams` (of output)."""
        self.slow_readers.labels(reason).inc()

    def note_split(self, split: SplitRequest) -> None:
        """The transfer of a prompt has ended."""
        self.split.inc()
        self.transferred.inc(split.num_bytes)
        if split.failure is not None:
            self.not_transferred.labels(split.failure.value).inc()

    def _refused(self, code: str | None) -> None:
        self.refusals.labels(code if code in _CODES else "other").inc()

    def _note_output(self, output: RequestOutput) -> None:
        times = output.metrics
        num_tokens = sum(len(each.token_ids) for each in output.outputs)
        for each in output.outputs:
            self.successes.labels(each.finish_reason if each.finish_reason in _REASONS else "other").inc()
        self.prompt_length.observe(len(output.prompt_token_ids))
        self.output_length.observe(num_tokens)
        self.longest_output.observe(max((len(each.token_ids) for each in output.outputs), default=0))
        self.computed_prompt.observe(max(len(output.prompt_token_ids) - times.num_cached_tokens, 0))
        if times.time_to_first_token_s is not None:
            self.first_token.observe(times.time_to_first_token_s)
        if times.queue_s is not None:
            self.queue.observe(times.queue_s)
        if times.total_s is not None:
            self.whole.observe(times.total_s)
        if times.first_token_s is not None and times.seated_s is not None:
            self.prefill.observe(times.first_token_s - times.seated_s)
        if times.seated_s is not None and times.finished_s is not None:
            self.inference.observe(times.finished_s - times.seated_s)
        if times.first_token_s is not None and times.finished_s is not None:
            decode_s = times.finished_s - times.first_token_s
            self.decode.observe(decode_s)
            if num_tokens > len(output.outputs):
                self.per_token.observe(decode_s * len(output.outputs) / (num_tokens - len(output.outputs)))

    def _note_params(self, params: SamplingParams) -> None:
        self.params_n.observe(params.n)
        if params.max_tokens is not None:
            self.params_max_tokens.observe(params.max_tokens)


class Distribution(Collector):
    """A histogram for per-token events: prometheus_client's own takes two locks and walks the buckets.

    Used on the event loop's thread only.
    """

    def __init__(self, name: str, text: str, buckets: tuple[float, ...]) -> None:
        self._name = name
        self._text = text
        self._buckets = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._buckets, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        names = [*map(floatToGoString, self._buckets), "+Inf"]
        counts: list[tuple[str, float]] = [*zip(names, accumulate(self._counts), strict=True)]
        yield HistogramMetricFamily(f"quire_{self._name}", self._text, counts, self._sum)


class EngineGauges(Collector):
    """The engine as of its last heartbeat."""

    def __init__(self, stats: Callable[[], EngineStats | None]) -> None:
        self._stats = stats
        self._latest: EngineStats | None = None
        self._earlier: dict[str, float] = dict.fromkeys(_COUNTED, 0)  # totals of earlier engines
        self.num_restarts: Callable[[], int] = lambda: 0
        self.num_lines_lost: Callable[[], int] = lambda: 0
        self.info: Callable[[], EngineInfo | None] = lambda: None

    def note_loss(self) -> None:
        """The engine is gone: add the counts of its last heartbeat to the totals, scraped or not."""
        last = self._stats() or self._latest
        if last is not None:
            for name in _COUNTED:
                self._earlier[name] += getattr(last, name)
        self._latest = None

    def total(self, name: str) -> float:
        stats = self._latest = self._stats() or self._latest
        return self._earlier[name] + (0 if stats is None else getattr(stats, name))

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield _gauge("engine_up", "Whether the engine is up.", float(stats is not None))
        yield _counter("engine_restarts", "Restarts of the engine process.", self.num_restarts())
        yield _counter("log_lines_lost", "Log lines that could not be written.", self.num_lines_lost())
        names = {
            "prompt_tokens": ("prompt_tokens", "Prompt tokens of admitted requests."),
            "prefix_cache_queries": ("prompt_tokens", "Prompt tokens looked up in the prefix cache."),
            "prefix_cache_hits": ("cached_tokens", "Prompt tokens found in the prefix cache."),
            "computed_tokens": ("computed_tokens", "Tokens computed, prefill and decode."),
            "sampled_tokens": ("sampled_tokens", "Tokens sampled, counted at each step."),
            "recomputed_tokens": ("recomputed_tokens", "Tokens computed again after a preemption."),
            "num_preemptions": ("preemptions", "Preemptions of running requests."),
            "spec_decode_num_draft_tokens": ("drafted_tokens", "Drafts verified by speculative decoding."),
            "spec_decode_num_accepted_tokens": ("accepted_tokens", "Of those, accepted."),
            "forks": ("forks", "Sequences forked from another one."),
            "moved_blocks": ("moved_blocks", "KV blocks copied, swapped or promoted."),
            "lost_steps": ("lost_steps", "Steps lost by a failure of the runner."),
            "replayed_steps": ("replayed_steps", "Steps run as a captured CUDA graph."),
            "eager_steps": ("eager_steps", "Steps launched kernel by kernel on a GPU."),
            "eager_launch_seconds": ("eager_s", "Host time of launching those."),
            "graph_capture_seconds": ("capture_s", "Host time of capturing CUDA graphs."),
        }
        for name, (field, text) in names.items():
            yield _counter(name, text, self.total(field))
        name, text = "paced_steps", "Steps by what limited their prompt tokens."
        paced = CounterMetricFamily(f"quire_{name}", text, labels=["bound"])
        for bound in _BOUNDS:
            paced.add_metric([bound], self.total(f"steps_{bound}"))
        yield paced
        name, text = "spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by their number in a row and step."
        places = CounterMetricFamily(f"quire_{name}", text, labels=["position"])
        for place in range(1, MAX_DRAFTS + 1):
            places.add_metric([str(place - 1)], self.total(f"accepted_at_{place}"))
        yield places
        for kind, text in (("drafted", "Drafts verified, by drafter."), ("accepted", "Drafts accepted, by drafter.")):
            by_drafter = CounterMetricFamily(f"quire_spec_decode_{kind}_tokens_by", text, labels=["drafter"])
            for drafter in DRAFTERS:
                by_drafter.add_metric([drafter], self.total(f"{kind}_by_{drafter}"))
            yield by_drafter
        yield from self._gauges(stats)
        yield self._memory_gauge(stats)

    def _memory_gauge(self, stats: EngineStats | None) -> Metric:
        """As the engine became ready, but for the CUDA graphs that were captured since."""
        info = self.info()
        usage = MemoryUsage() if info is None else info.memory
        if stats is not None:
            usage = usage.with_graphs(stats.captured_bytes)
        memory = GaugeMetricFamily("quire_memory_bytes", "Device memory by use.", labels=["holder"])
        for holder in fields(MemoryUsage):
            memory.add_metric([holder.name], getattr(usage, holder.name))
        return memory

    def _gauges(self, stats: EngineStats | None) -> Iterator[Metric]:
        idle = dict.fromkeys((field.name for field in fields(EngineStats)), 0)
        now = idle if stats is None else {name: getattr(stats, name) for name in idle}
        held = now["num_blocks"] - now["num_free_blocks"] - now["num_evictable_blocks"]
        yield _gauge("num_requests_running", "Running requests.", now["num_running"])
        yield _gauge("num_requests_waiting", "Requests in the waiting queue.", now["num_waiting"])
        yield _gauge("num_waiting_tokens", "Prompt tokens of requests in the waiting queue.", now["num_waiting_tokens"])
        yield _gauge("kv_cache_usage_perc", "Fraction of the KV cache in use by requests (0 to 1).",
                     held / now["num_blocks"] if now["num_blocks"] else 0.0)  # fmt: skip
        blocks = GaugeMetricFamily("quire_kv_blocks", "KV blocks by state.", labels=["state"])
        blocks.add_metric(["free"], now["num_free_blocks"])
        blocks.add_metric(["held"], held)
        blocks.add_metric(["cached"], now["num_evictable_blocks"])
        blocks.add_metric(["host"], now["num_host_blocks"])
        yield blocks
        yield _gauge("kv_promised_blocks", "KV blocks reserved for running requests.", now["num_reserved_blocks"])
        yield _gauge("captured_shapes", "Step shapes captured as CUDA graphs.", now["captured_shapes"])
        yield _gauge("waiting_for_blocks", "Whether the head of the queue waits for KV blocks.",
                     float(now["waiting_for"] in ("blocks", "pressure")))  # fmt: skip


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"quire_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"quire_{name}", text, value=value)


_SAME_NAME = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens",
    "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "spec_decode_num_accepted_tokens_per_pos",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_inference_time_seconds", "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens",
    "request_params_n", "request_params_max_tokens",
)  # fmt: skip
# vLLM's earlier names, which routers still ask for, and what it names differently: its time per output token is that
# between two tokens; the mean by request has `request_` before it.
_OTHER_NAMES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
    "request_time_per_output_token_seconds": "time_per_output_token_seconds",
}
_SOURCES = {
    f"vllm:{name}": f"quire_{source}"
    for name, source in {**{name: name for name in _SAME_NAME}, **_OTHER_NAMES}.items()
}


class VllmMetrics:
    """vLLM's names for the metrics of one served model, for dashboards, routers and autoscalers that ask for those.

    Gateway API inference extension, llm-d, vLLM's production stack, KEDA scalers and vLLM's Grafana dashboard read
    `vllm:…` series with the label `model_name`. Each alias has the samples of one of our families, so both always
    agree. LoRA adapters are not served: the series that says which are loaded is there, and empty.
    """

    def __init__(self, model_name: str, info: Callable[[], EngineInfo | None]) -> None:
        self._label = {"model_name": model_name}
        self._info = info

    def aliases(self, families: Iterable[Metric]) -> Iterator[Metric]:
        """The aliases of these families, and the size of the KV cache."""
        by_name = {family.name: family for family in families}
        for name, source in _SOURCES.items():
            yield self._renamed(by_name[source], name)
        info = self._info()
        if info is not None:
            cache = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
            config = GaugeMetricFamily("vllm:cache_config_info", "Size of the KV cache.", labels=[*self._label, *cache])
            config.add_metric([*self._label.values(), *cache.values()], 1.0)
            yield config
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        lora = GaugeMetricFamily("vllm:lora_requests_info", "LoRA adapters: none.", labels=[*self._label, *adapters])
        lora.add_metric([*self._label.values(), *adapters.values()], 1.0)
        yield lora

    def _renamed(self, family: Metric, name: str) -> Metric:
        alias = Metric(name, f"{family.documentation} As {family.name}.", family.type)
        alias.samples = [
            Sample(name + sample.name.removeprefix(family.name), {**self._label, **sample.labels}, sample.value)
            for sample in family.samples
        ]
        return alias
