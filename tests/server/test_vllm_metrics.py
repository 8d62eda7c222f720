"""vLLM's names of metrics: what dashboards, routers and autoscalers written for vLLM ask for, with the same values."""

import itertools

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from quire.server.metrics import Metrics
from tests.server.local_server import LocalServer
from tests.server.scripted_servers import completion_body
from tests.server.server_process import wait_until_at_rest

ASKED_FOR = {
    "Gateway API inference extension": {
        "vllm:num_requests_waiting", "vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:cache_config_info",
        "vllm:lora_requests_info",
    },
    "production stack": {
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:gpu_cache_usage_perc",
        "vllm:gpu_prefix_cache_queries_total", "vllm:gpu_prefix_cache_hits_total",
    },
    "Grafana": {
        "vllm:e2e_request_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_sum",
        "vllm:e2e_request_latency_seconds_count", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:time_per_output_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket",
        "vllm:request_time_per_output_token_seconds_bucket", "vllm:time_to_first_token_seconds_bucket",
        "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:request_success_total",
        "vllm:request_queue_time_seconds_sum", "vllm:request_prefill_time_seconds_sum",
        "vllm:request_decode_time_seconds_sum", "vllm:num_preemptions_total", "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total", "vllm:request_max_num_generation_tokens_sum",
        "vllm:request_inference_time_seconds_sum", "vllm:request_prefill_kv_computed_tokens_sum",
        "vllm:request_params_n_bucket", "vllm:request_params_max_tokens_bucket",
    },
}  # fmt: skip


def samples_of(page: str) -> dict[str, list[Sample]]:
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


@pytest.fixture(scope="module")
def samples(scripted_server: LocalServer) -> dict[str, list[Sample]]:
    """Of a server that has answered, and is at rest."""
    with scripted_server.client() as client:
        for n in (1, 3):
            body = completion_body("hello " * 40, n=n, temperature=0.5)
            assert client.post("/v1/completions", json=body).status_code == 200
        wait_until_at_rest(client)
        name = client.get("/v1/models").json()["data"][0]["id"]
        samples = samples_of(client.get("/metrics").text)
    assert {sample.labels["model_name"] for name, all_of in samples.items() if name.startswith("vllm:")
            for sample in all_of} == {name}  # fmt: skip
    return samples


@pytest.mark.parametrize("names", ASKED_FOR.values(), ids=ASKED_FOR)
def test_what_is_asked_for_is_there(names: set[str], samples: dict[str, list[Sample]]) -> None:
    assert names <= set(samples)


def test_an_alias_has_the_values_of_its_source(samples: dict[str, list[Sample]]) -> None:
    others = {
        "gpu_cache_usage_perc": "kv_cache_usage_perc",
        "gpu_prefix_cache": "prefix_cache",
        "request_time_per_output_token": "time_per_output_token",
        "time_per_output_token": "inter_token_latency",
    }
    for name, aliases in samples.items():
        if not name.startswith("vllm:") or name in ("vllm:cache_config_info", "vllm:lora_requests_info"):
            continue
        own = name.removeprefix("vllm:")
        before = next((alias for alias in others if own.startswith(alias)), "")
        own = own.replace(before, others.get(before, ""), 1) if before else own
        expected = [(sample.labels, sample.value) for sample in samples[f"quire_{own}"]]
        shown = [({k: v for k, v in each.labels.items() if k != "model_name"}, each.value) for each in aliases]
        assert shown == expected, name
    [generated] = samples["vllm:generation_tokens_total"]
    assert generated.value > 0
    stopped = [each.value for each in samples["vllm:request_success_total"] if each.labels["finished_reason"] == "stop"]
    assert sum(stopped) >= 1


def test_sizes_and_parameters_of_requests_are_counted(samples: dict[str, list[Sample]]) -> None:
    """Of the two: n is 1 and 3, so the longest continuations have less than all have together."""

    def total(name: str) -> float:
        [sample] = samples[f"vllm:request_{name}_sum"]
        return sample.value

    assert (total("params_n"), total("params_max_tokens")) == (4, 4000)
    assert 0 < 2 * total("max_num_generation_tokens") == total("generation_tokens"), "each says the same"
    [hits] = samples["vllm:prefix_cache_hits_total"]
    assert total("prefill_kv_computed_tokens") == total("prompt_tokens") - hits.value and hits.value > 0
    assert total("inference_time_seconds") >= total("decode_time_seconds") > 0


def test_the_size_of_the_cache_is_a_label(samples: dict[str, list[Sample]]) -> None:
    [config] = samples["vllm:cache_config_info"]
    blocks = sum(each.value for each in samples["quire_kv_blocks"] if each.labels["state"] != "host")
    assert config.value == 1 and int(config.labels["block_size"]) == 32
    assert int(config.labels["num_gpu_blocks"]) == blocks


def test_no_adapter_is_said_to_be_loaded(samples: dict[str, list[Sample]]) -> None:
    [lora] = samples["vllm:lora_requests_info"]
    assert (lora.labels["max_lora"], lora.labels["running_lora_adapters"], lora.labels["waiting_lora_adapters"]) == (
        "0", "", "",
    )  # fmt: skip


def test_without_an_engine_there_is_a_page() -> None:
    assert "vllm:cache_config_info" not in samples_of(Metrics(lambda: None, lambda: 0.0, "m").page().decode())


def test_a_flood_of_requests_for_the_page_takes_a_share_of_the_time() -> None:
    """Each look at this clock takes 30 ms, so that a page takes 30 and the next comes 30 later."""
    clock = (0.03 * count for count in itertools.count())
    metrics = Metrics(lambda: None, clock.__next__)
    fresh = 0
    for count in range(300):
        metrics.generation_tokens.inc()
        fresh += f"quire_generation_tokens_total {count + 1}.0" in metrics.page().decode()
    assert 4 <= fresh < 120, "a tenth of a second at once, then every so often"
    calm = Metrics(lambda: None, lambda: 0.0)
    for count in range(20):
        calm.generation_tokens.inc()
        assert f"quire_generation_tokens_total {count + 1}.0" in calm.page().decode()
