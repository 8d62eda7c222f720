"""vLLM's names for the metrics of this server, for dashboards, routers and autoscalers that ask for those.

Gateway API inference extension, llm-d, vLLM's production stack, KEDA scalers and vLLM's Grafana dashboard read `vllm:…`
series with the label `model_name`. Each alias has the samples of one of our families, so both always agree. There are
no aliases where nothing is measured (LoRA adapters).
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.samples import Sample

from quire.engine.stats import EngineInfo

_SAME_NAME = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions", "prompt_tokens",
    "generation_tokens", "prefix_cache_queries", "prefix_cache_hits", "request_success", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
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
    """The aliases of one served model."""

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

    def _renamed(self, family: Metric, name: str) -> Metric:
        alias = Metric(name, f"{family.documentation} As {family.name}.", family.type)
        alias.samples = [
            Sample(name + sample.name.removeprefix(family.name), {**self._label, **sample.labels}, sample.value)
            for sample in family.samples
        ]
        return alias
