"""`quire top`: rates and quantiles between two samples of the metrics, and the command against a real server."""

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from threading import Thread

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quire.cli.top import (
    Bucket,
    MetricsClient,
    Quantiles,
    TopSample,
    _quantile,
    as_object,
    compare,
    read_engine,
    read_load,
    read_page,
    sparkline,
    table,
)
from quire.core.errors import ConfigError
from tests.cli.commands import Shell
from tests.server.local_server import local_server
from tests.server.several_models import answer, ask, endless, several_here, write_slow

PAGE = """\
# TYPE quire_engine_up gauge
quire_engine_up 1.0
# TYPE quire_num_requests_running gauge
quire_num_requests_running {running}
# TYPE quire_kv_cache_usage_perc gauge
quire_kv_cache_usage_perc 0.25
# TYPE quire_sampled_tokens_total counter
quire_sampled_tokens_total {sampled}
# TYPE quire_prompt_tokens_total counter
quire_prompt_tokens_total {prompt}
# TYPE quire_prefix_cache_queries_total counter
quire_prefix_cache_queries_total {prompt}
# TYPE quire_prefix_cache_hits_total counter
quire_prefix_cache_hits_total {cached}
# TYPE quire_request_success_total counter
quire_request_success_total{{finished_reason="stop"}} {stopped}
quire_request_success_total{{finished_reason="length"}} 1.0
# TYPE quire_time_to_first_token_seconds histogram
quire_time_to_first_token_seconds_bucket{{le="0.1"}} {quick}
quire_time_to_first_token_seconds_bucket{{le="0.2"}} {all}
quire_time_to_first_token_seconds_bucket{{le="+Inf"}} {all}
quire_time_to_first_token_seconds_count {all}
quire_time_to_first_token_seconds_sum 1.0
"""


def page(**numbers: float) -> str:
    values = {"running": 0, "sampled": 0, "prompt": 0, "cached": 0, "stopped": 0, "quick": 0, "all": 0} | numbers
    return PAGE.format(**values)


def test_rates_are_of_the_time_between_two_samples() -> None:
    before = read_page(page(sampled=100, prompt=60, cached=20, stopped=3), 10.0)
    after = read_page(page(running=2, sampled=160, prompt=100, cached=30, stopped=7), 12.0)
    view = compare(before, after)
    assert (view.num_running, view.kv_usage, view.seconds) == (2, 0.25, 2.0)
    assert view.prompt_tokens_per_s == 20.0
    assert view.generated_tokens_per_s == 30.0
    assert view.prefix_hit == 0.25
    assert view.finished_per_s == 2.0  # both reasons count, and the one that stood still adds nothing


def test_quantiles_are_of_the_observations_in_between() -> None:
    before = read_page(page(quick=100, all=100), 0.0)
    after = read_page(page(quick=100, all=110), 1.0)
    quantiles = compare(before, after).time_to_first_token
    assert quantiles is not None
    assert quantiles == pytest.approx((0.15, 0.19, 0.199))  # all ten in the second bucket, evenly


def test_without_observations_there_is_no_quantile() -> None:
    sample = read_page(page(quick=5, all=5), 0.0)
    view = compare(sample, sample._replace(at_s=1.0))
    assert view.time_to_first_token is None and view.inter_token_latency is None and view.prefix_hit is None


def test_a_restarted_server_counts_from_zero() -> None:
    before = read_page(page(sampled=500, prompt=500, quick=50, all=50), 0.0)
    after = read_page(page(sampled=6, prompt=4, quick=2, all=2), 1.0)
    view = compare(before, after)
    assert (view.prompt_tokens_per_s, view.generated_tokens_per_s) == (4.0, 6.0)
    assert view.time_to_first_token is not None and view.time_to_first_token.p99_s <= 0.1


def test_one_sample_has_no_rates() -> None:
    view = compare(None, read_page(page(sampled=6, prompt=4, quick=2, all=2), 1.0))
    assert (view.seconds, view.generated_tokens_per_s) == (0.0, 0.0)
    assert view.time_to_first_token is not None


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_where_its_rank_falls(counts: list[int], share: float) -> None:
    total, buckets = 0, []
    for limit, count in enumerate(counts, 1):
        total += count
        buckets.append(Bucket(float(limit), total))
    if not total:
        return
    found = _quantile(buckets, share)
    below = max((bucket.num_within for bucket in buckets if bucket.limit_s < found), default=0)
    reached = min(bucket.num_within for bucket in buckets if bucket.limit_s >= found)
    assert below <= share * total <= reached + 1e-9


@pytest.mark.parametrize("text", ["<html>", "", "up 1\n", 'broken{le="x" 3\n'])
def test_another_page_is_refused_in_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError):
        read_page(text, 0.0)


STATE: dict[str, object] = {
    "step": 9, "num_blocks": 40, "num_free": 8, "num_evictable": 2, "num_cached": 8, "num_host": 0, "max_rows": 4,
    "waiting_for": "rows", "queue": [{"priority": 5, "tenant": "a", "num_requests": 2}],
    "steps": [{"seconds": 0.01}, {"seconds": 0.02}, {"seconds": 0.03}],
}  # fmt: skip


def test_without_an_engine_the_metrics_remain() -> None:
    view = compare(None, read_page(page(running=3), 0.0))
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table("http://here", [TopSample(view, None, 7)]))
    assert "3 running · " in capture.get() and "25 %" in capture.get() and "step" not in capture.get()
    assert as_object("http://here", TopSample(view, None, 7))["engine"] is None


def test_a_sparkline_is_relative_to_its_largest_value() -> None:
    assert sparkline([0, 1, 7]) == "▁▂█" and sparkline([]) == sparkline([3]) == sparkline([0, 0]) == ""
    assert len(sparkline(range(100))) == 30


@pytest.mark.parametrize("wrong", ["", "[]", "{}", json.dumps({**STATE, "queue": [{}]})])
def test_the_state_of_another_version_is_refused(wrong: str) -> None:
    with pytest.raises(ConfigError, match="Update one of the two"):
        read_engine(wrong)


def test_the_table_shows_the_view() -> None:
    view = compare(read_page(page(), 0.0), read_page(page(running=3, sampled=50, quick=4, all=4), 1.0))
    engine = read_engine(json.dumps(STATE))
    calm = replace(view, num_running=0, generated_tokens_per_s=0.0)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table("http://here", [TopSample(calm, engine, 0), TopSample(view, engine, 7)]))
    result = capture.get()
    assert "class 5 a: 2" in result and "30 of 40 blocks held · 8 cached" in result and "median 20.0 ms" in result
    assert "▁█" in result and "▃▆█" in result, "generated tokens, and step times of both samples"
    assert "3 running of 4" and "7 open" in result and "50.0 generated/s" in result and "25 %" in result
    assert "p50 50 ms" in result and "first token" in result


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[str]:
    with local_server(tmp_path_factory.mktemp("top"), [{"say": "One two three four."}, {"step_ms": 2}]) as server:
        yield server.url


def test_once_as_json_against_a_server(quire: Shell, url: str) -> None:
    before = MetricsClient(url, None).read()
    body = {"messages": [{"role": "user", "content": "count"}]}
    assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 200
    view = compare(before, MetricsClient(url, None).read())
    assert view.finished_per_s > 0 and isinstance(view.time_to_first_token, Quantiles)
    sample = MetricsClient(url, None).sample(before, MetricsClient(url, None).read())
    report = json.loads(json.dumps(as_object(url, sample)))
    assert report["engine"]["num_held"] <= report["engine"]["num_blocks"] and report["engine"]["queue"] == []
    assert set(report["time_to_first_token"]) == {"p50_s", "p90_s", "p99_s"}
    while compare(None, MetricsClient(url, None).read()).num_running:
        pass  # the engine reports its statistics a few times a second
    result = quire("top", url, "--once", "--json", "--every", "0.1")
    assert result.status == 0, result.err
    report = json.loads(result.out)
    assert report["engine_up"] is True and report["url"] == url
    assert (report["num_running"], report["num_waiting"], report["num_open"]) == (0, 0, 0)
    assert report["time_to_first_token"] is None, "no request came between the two samples"


def test_a_running_request_is_counted(url: str) -> None:
    body = {"prompt": "count", "max_tokens": 1000, "ignore_eos": True}
    sender = Thread(target=httpx.post, args=(f"{url}/v1/completions",), kwargs={"json": body, "timeout": 120})
    sender.start()
    server = MetricsClient(url, None)
    while not server.load().num_open:
        assert sender.is_alive(), "it ended before it was seen"
    before = server.read()
    while (view := compare(before, server.read())).generated_tokens_per_s == 0:
        assert sender.is_alive(), "no token was seen"
    assert view.num_running == 1
    sender.join()


def test_each_of_several_models_has_a_line(default_model_path: Path, tmp_path: Path) -> None:
    write_slow(tmp_path, "one")
    with several_here(tmp_path, "--models-max", "2", one={}, two={}) as running, running.client() as client:
        assert answer(ask(client, "two")) == "I am two."
        watching = MetricsClient(running.url, None)
        while (before := watching.read()).totals["num_requests_running"]:
            pass  # the engine reports its statistics a few times a second
        with client.stream("POST", "/v1/completions", json=endless("one")) as stream:
            lines = stream.iter_lines()  # once it is collected its connection is closed
            next(lines)
            while not (sample := watching.sample(before, watching.read())).models[0].generated_tokens_per_s:
                pass
            one, two = sample.models
            assert (one.name, one.status, one.num_running) == ("one", "loaded", 1) and one.kv_usage > 0
            assert (two.name, two.status, two.num_running, two.generated_tokens_per_s) == ("two", "loaded", 0, 0.0)
            assert sample.engine is None and sample.view.num_models_loaded == 2
        report = json.loads(json.dumps(as_object("http://here", sample)))
        assert [model["name"] for model in report["models"]] == ["one", "two"]
    waiting = replace(two, status="loading", num_waiting_for_load=3)
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table("http://here", [sample._replace(models=(one, waiting))]))
    assert (
        "models" in capture.get() and "2 loaded" in capture.get() and "one: 1 running · 0 waiting · kv" in capture.get()
    )
    assert "two: loading · 3 waiting for its load" in capture.get()


@pytest.mark.parametrize("page", ["", "[]", '{"models": {"a": {}}}', '{"server_load": "x"}', '{"models": 3}'])
def test_a_load_of_something_else_is_refused(page: str) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        read_load(page)


def test_an_address_without_a_server_is_refused(quire: Shell) -> None:
    result = quire("top", "http://127.0.0.1:9", "--once")
    assert result.status != 0 and "No server answers" in result.err and "Traceback" not in result.err
    assert MetricsClient("localhost", None).url == "http://localhost:8000"
    assert MetricsClient("localhost:81/x", None).url == "http://localhost:81/x"
    with pytest.raises(ConfigError, match="is not a server address"):
        MetricsClient("ftp://localhost", None)


def test_a_keyed_server_opens_to_the_first_key_of_its_file(
    quire: Shell, tmp_path: Path, default_model_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-top name=top\n")
    with local_server(tmp_path, [{"say": "hi"}], "--api-key-file", str(keys)) as server:
        url = server.url
        refused = quire("top", url, "--once", "--every", "0.1")
        assert refused.status != 0 and "--api-key-file, --api-key or QUIRE_API_KEY" in refused.err
        assert quire("top", url, "--once", "--every", "0.1", "--api-key-file", str(keys)).status == 0
        assert quire("top", url, "--once", "--every", "0.1", "--api-key", "sk-top").status == 0
        assert quire("top", url, "--once", "--every", "0.1", "--api-key", "sk-other").status != 0


def test_a_file_of_bytes_holds_no_keys(quire: Shell, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(b"\xff\xfe\x00")
    result = quire("top", "http://127.0.0.1:1", "--once", "--api-key-file", str(keys))
    assert result == (2, "", f"quire: {keys} holds no keys: it is not UTF-8 text.\n")


def test_a_server_of_another_protocol_is_refused(quire: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        thread = Thread(target=serve)
        thread.start()
        result = quire("top", f"http://127.0.0.1:{other.getsockname()[1]}", "--once")
        thread.join()
    assert result.status == 2 and result.err.startswith("quire: No server answers at http://127.0.0.1:")
    assert result.err.count("\n") == 1
