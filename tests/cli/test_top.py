"""`quire top`: what two metrics pages say of the time between them, and the command against a real server."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quire.cli.top import Bucket, Quantiles, WatchedServer, _quantile, as_object, compare, read_page, table
from quire.core.errors import ConfigError
from tests.cli.commands import Shell
from tests.clients.client_server import scripted

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
    said = {"running": 0, "sampled": 0, "prompt": 0, "cached": 0, "stopped": 0, "quick": 0, "all": 0} | numbers
    return PAGE.format(**said)


def test_rates_are_of_the_time_between_two_readings() -> None:
    before = read_page(page(sampled=100, prompt=60, cached=20, stopped=3), 10.0)
    after = read_page(page(running=2, sampled=160, prompt=100, cached=30, stopped=7), 12.0)
    view = compare(before, after)
    assert (view.num_running, view.kv_usage, view.seconds) == (2, 0.25, 2.0)
    assert view.prompt_tokens_per_s == 20.0
    assert view.generated_tokens_per_s == 30.0
    assert view.prefix_hit == 0.25
    assert view.finished_per_s == 2.0  # both reasons count, and the one that stood still adds nothing


def test_quantiles_are_of_what_came_between() -> None:
    before = read_page(page(quick=100, all=100), 0.0)
    after = read_page(page(quick=100, all=110), 1.0)
    quantiles = compare(before, after).time_to_first_token
    assert quantiles is not None
    assert quantiles == pytest.approx((0.15, 0.19, 0.199))  # all ten in the second bucket, evenly


def test_nothing_between_is_no_quantile() -> None:
    reading = read_page(page(quick=5, all=5), 0.0)
    view = compare(reading, reading._replace(at_s=1.0))
    assert view.time_to_first_token is None and view.inter_token_latency is None and view.prefix_hit is None


def test_a_server_started_anew_counts_from_zero() -> None:
    before = read_page(page(sampled=500, prompt=500, quick=50, all=50), 0.0)
    after = read_page(page(sampled=6, prompt=4, quick=2, all=2), 1.0)
    view = compare(before, after)
    assert (view.prompt_tokens_per_s, view.generated_tokens_per_s) == (4.0, 6.0)
    assert view.time_to_first_token is not None and view.time_to_first_token.p99_s <= 0.1


def test_one_reading_has_no_rates() -> None:
    view = compare(None, read_page(page(sampled=6, prompt=4, quick=2, all=2), 1.0))
    assert (view.seconds, view.generated_tokens_per_s) == (0.0, 0.0)
    assert view.time_to_first_token is not None


@given(st.lists(st.integers(0, 50), min_size=2, max_size=8), st.floats(0.01, 0.99))
def test_a_quantile_lies_in_the_bucket_where_its_rank_falls(counts: list[int], share: float) -> None:
    total, buckets = 0, []
    for place, count in enumerate(counts, 1):
        total += count
        buckets.append(Bucket(float(place), total))
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


def test_the_table_says_what_the_view_knows() -> None:
    view = compare(read_page(page(), 0.0), read_page(page(running=3, sampled=50, quick=4, all=4), 1.0))
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table("http://here", view, 7))
    said = capture.get()
    assert "3 running" in said and "7 open" in said and "50.0 generated/s" in said and "25 %" in said
    assert "p50 50 ms" in said and "first token" in said


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[str]:
    with scripted(tmp_path_factory.mktemp("top"), [{"say": "One two three four."}, {"step_ms": 2}]) as url:
        yield url


def test_once_as_json_against_a_server(quire: Shell, url: str) -> None:
    before = WatchedServer(url, None).read()
    wish = {"messages": [{"role": "user", "content": "count"}]}
    assert httpx.post(f"{url}/v1/chat/completions", json=wish, timeout=60).status_code == 200
    answered = compare(before, WatchedServer(url, None).read())
    assert answered.finished_per_s > 0 and isinstance(answered.time_to_first_token, Quantiles)
    told = json.loads(json.dumps(as_object(url, answered, 0)))
    assert set(told["time_to_first_token"]) == {"p50_s", "p90_s", "p99_s"}
    while compare(None, WatchedServer(url, None).read()).num_running:
        pass  # the engine tells how it stands a few times a second
    said = quire("top", url, "--once", "--json", "--every", "0.1")
    assert said.status == 0, said.err
    told = json.loads(said.out)
    assert told["engine_up"] is True and told["url"] == url
    assert (told["num_running"], told["num_waiting"], told["num_open"]) == (0, 0, 0)
    assert told["time_to_first_token"] is None, "nothing was asked between the two looks"


def test_a_request_that_runs_is_seen(url: str) -> None:
    wish = {"prompt": "count", "max_tokens": 1000, "ignore_eos": True}
    sender = Thread(target=httpx.post, args=(f"{url}/v1/completions",), kwargs={"json": wish, "timeout": 120})
    sender.start()
    server = WatchedServer(url, None)
    while not server.num_open():
        assert sender.is_alive(), "it ended before it was seen"
    before = server.read()
    while (view := compare(before, server.read())).generated_tokens_per_s == 0:
        assert sender.is_alive(), "no token was seen"
    assert view.num_running == 1
    sender.join()


def test_where_nobody_is_the_mistake_is_told(quire: Shell) -> None:
    said = quire("top", "http://127.0.0.1:9", "--once")
    assert said.status != 0 and "Nobody answers" in said.err and "Traceback" not in said.err
    said = quire("top", "localhost", "--once")
    assert said.status != 0 and "http://127.0.0.1:8000" in said.err


def test_a_keyed_server_opens_to_the_first_key_of_its_file(
    quire: Shell, tmp_path: Path, default_model_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-top name=top\n")
    with scripted(tmp_path, [{"say": "hi"}], "--api-key-file", str(keys)) as url:
        refused = quire("top", url, "--once", "--every", "0.1")
        assert refused.status != 0 and "--api-key-file" in refused.err
        assert quire("top", url, "--once", "--every", "0.1", "--api-key-file", str(keys)).status == 0


def test_a_file_of_bytes_holds_no_keys(quire: Shell, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_bytes(b"\xff\xfe\x00")
    said = quire("top", "http://127.0.0.1:1", "--once", "--api-key-file", str(keys))
    assert said == (2, "", f"quire: {keys} holds no keys: it is not UTF-8 text.\n")


def test_who_speaks_no_http_is_no_server(quire: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet() -> None:
            visitor, _ = other.accept()
            with visitor:
                visitor.recv(4096)
                visitor.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        greeting = Thread(target=greet)
        greeting.start()
        said = quire("top", f"http://127.0.0.1:{other.getsockname()[1]}", "--once")
        greeting.join()
    assert said.status == 2 and said.err.startswith("quire: Nobody answers at http://127.0.0.1:")
    assert said.err.count("\n") == 1
