"""Several models behind one server: loaded for their requests, unloaded for others, and no request is lost."""

import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.cli.top import compare, read_page
from quire.core.errors import InvalidParameter
from quire.server import model_router
from quire.server.app import ENDPOINTS
from quire.server.router_app import BY_QUERY, HANDLERS, OF_ENGINE, SHARED, keep_alive_s
from tests.server.local_server import LocalServer
from tests.server.server_process import wait_until
from tests.server.several_models import (
    answer,
    ask,
    endless,
    hold_load,
    release_load,
    several_here,
    statuses,
    wait_for_waiting,
    write_slow,
)

pytestmark = pytest.mark.usefixtures("default_model_path")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[LocalServer]:
    """Two models, both of which may be loaded."""
    tables = {"a": {"served-model-name": ["a", "first"]}, "b": {"max-model-len": 512}}
    with several_here(tmp_path_factory.mktemp("pair"), "--models-max", "2", **tables) as server:
        yield server


def test_a_request_is_answered_by_the_model_that_it_names(pair: LocalServer) -> None:
    with pair.client() as client:
        assert answer(ask(client, "a")) == answer(ask(client, "first")) == answer(ask(client, None)) == "I am a."
        assert answer(ask(client, "b")) == "I am b."
        ollama = {"model": "b:latest", "messages": [{"role": "user", "content": "hi"}], "stream": False}
        assert client.post("/api/chat", json=ollama).json()["message"]["content"] == "I am b."
        anthropic = {"model": "b", "max_tokens": 20, "messages": [{"role": "user", "content": "hi"}]}
        assert client.post("/v1/messages", json=anthropic).json()["content"][0]["text"] == "I am b."
        assert client.post("/generate", json={"inputs": "hi"}).json()["generated_text"] == "I am a."
        tokens = client.post("/tokenize", json={"model": "b", "prompt": "hi"}).json()
        assert tokens["max_model_len"] == 512
        assert client.get("/props", params={"model": "b"}).json()["model_alias"] == "b"
        assert len(client.get("/slots", params={"model": "b"}).json()) > 0
        with openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as other:
            stream = other.completions.create(model="b", prompt="hi", stream=True)
            assert "".join(chunk.choices[0].text for chunk in stream) == "I am b."


def test_models_are_listed_with_their_state(pair: LocalServer) -> None:
    with pair.client() as client:
        answer(ask(client, "a"))
        answer(ask(client, "b"))
        assert statuses(client) == {"a": "loaded", "first": "loaded", "b": "loaded"}
        card = client.get("/v1/models/b").json()
        assert (card["max_model_len"], card["default_sampling_params"]["temperature"]) == (512, 0.2)
        assert [each["name"] for each in client.get("/api/tags").json()["models"]] == [
            "a:latest",
            "first:latest",
            "b:latest",
        ]
        assert [each["name"] for each in client.get("/api/ps").json()["models"]] == ["a:latest", "b:latest"]
        assert client.post("/api/show", json={"model": "b:latest"}).json()["details"]["format"] == "gguf"
        assert client.post("/api/pull", json={"model": "b"}).json() == {"status": "success"}
        assert client.get("/ready").json() == {"status": "ready", "models": 2, "models_loaded": 2}
        assert client.get("/health").status_code == 200
        load = client.get("/load").json()
        assert load["models"]["b"]["engine"] == "ready" and load["server_load"] == 0
        assert client.get("/server_info").json()["served_model_name"] == "a"
        assert [each["dp_rank"] for each in client.get("/get_load").json()] == [0, 1]


def test_an_unknown_name_is_a_404_that_lists_the_names(pair: LocalServer) -> None:
    with pair.client() as client:
        for response in (ask(client, "c"), client.get("/v1/models/c"), client.get("/props", params={"model": "c"})):
            error = response.json()["error"]
            assert response.status_code == 404 and error["code"] == "model_not_found"
            assert "this server has 'a', 'first', 'b'" in error["message"]
        shown = client.post("/api/chat", json={"model": "c:latest", "messages": []})
        assert shown.status_code == 404 and "this server has" in shown.json()["error"]
        wrong = client.post("/v1/chat/completions", json={"model": 7, "messages": []})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "model"
        assert client.post("/v1/completions", content=b"{").status_code == 400


def test_a_stored_response_is_continued_by_another_model(pair: LocalServer) -> None:
    with pair.client() as client:
        first = client.post("/v1/responses", json={"model": "a", "input": "hi"}).json()
        assert client.get(f"/v1/responses/{first['id']}").json()["model"] == "a"
        body = {"model": "b", "input": "and you?", "previous_response_id": first["id"]}
        assert client.post("/v1/responses", json=body).json()["output"][0]["content"][0]["text"] == "I am b."
        background = client.post("/v1/responses", json={"model": "b", "input": "hi", "background": True}).json()
        wait_until(lambda: client.get(f"/v1/responses/{background['id']}").json()["status"] == "completed")


def test_metrics_of_all_models_have_their_names(pair: LocalServer) -> None:
    with pair.client() as client:
        answer(ask(client, "a"))
        answer(ask(client, "b"))
        page = client.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(page)}
    view = compare(None, read_page(page, 1.0))
    assert view.engine_up and view.num_models_loaded == 2 and 0 <= view.kv_usage <= 1 and view.end_to_end is not None
    up = {sample.labels["model"]: sample.value for sample in families["quire_engine_up"].samples}
    assert up.keys() == {"a", "b"}
    done = [sample for sample in families["quire_request_success"].samples if sample.value]
    assert {sample.labels["model"] for sample in done} == {"a", "b"}
    assert {sample.labels["model_name"] for sample in families["vllm:num_requests_running"].samples} == {"a", "b"}
    assert all("model" not in sample.labels for sample in families["quire_http_requests"].samples)
    assert {sample.value for sample in families["quire_model_loads"].samples} == {1.0}


def test_the_operator_sees_and_ends_requests_of_all_models(tmp_path: Path) -> None:
    write_slow(tmp_path, "b")
    with (
        several_here(tmp_path, "--models-max", "2", "--admin-key", "boss", a={}, b={}) as server,
        server.client() as client,
        server.client(headers={"authorization": "Bearer boss"}) as boss,
    ):
        answer(ask(client, "a"))
        with client.stream("POST", "/v1/completions", json=endless("b")) as stream:
            request_id = stream.headers["x-quire-request-id"]
            assert boss.get(f"/requests/{request_id}/explain").json()["model"] == "b"
            assert boss.get("/engine/state", params={"model": "b"}).json()["step"] >= 0
            assert boss.post("/abort_requests", json={"request_ids": [request_id]}).json() == {"aborted": 1}
            assert b"ended by the operator" in stream.read()
        assert boss.post("/abort_requests", json={"request_ids": ["none"]}).status_code == 404
        assert boss.post("/reset_prefix_cache").json()["models"].keys() == {"a", "b"}
        assert boss.post("/pause").json() == {"paused": True}
        assert ask(client, "a").json()["error"]["code"] == "paused" and client.get("/ready").status_code == 503
        assert boss.post("/resume").json() == {"paused": False}
        assert answer(ask(client, "a")) == "I am a."


def test_an_explanation_is_gone_with_its_engine(tmp_path: Path) -> None:
    with (
        several_here(tmp_path, "--admin-key", "boss", a={}, b={}) as server,
        server.client(headers={"authorization": "Bearer boss"}) as boss,
    ):
        request_id = ask(boss, "a").headers["x-quire-request-id"]
        assert boss.get(f"/requests/{request_id}/explain").json()["model"] == "a"
        answer(ask(boss, "b"))
        gone = boss.get(f"/requests/{request_id}/explain")
    assert gone.status_code == 404 and "The model 'a' was unloaded" in gone.json()["error"]["message"]


def test_two_models_under_load_take_turns_and_lose_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_router, "TURN_S", 0.0)
    names = [name for _ in range(12) for name in ("a", "b", "b", "a", "a", "b")]
    with several_here(tmp_path, a={}, b={}) as server, server.client() as client, ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: answer(ask(client, name)), names))
        loads = Counter(name for name, what in server.changes if what.startswith("loaded"))
        now = statuses(client)
    assert answers == [f"I am {name}." for name in names]
    assert loads["a"] >= 2 and loads["b"] >= 2, server.changes  # evicted and loaded again
    assert sorted(now.values()) in (["loaded", "unloaded"], ["loading", "unloaded"], ["unloaded", "unloading"])


def test_a_model_with_a_request_is_not_unloaded_and_new_ones_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_router, "TURN_S", 0.0)
    write_slow(tmp_path, "a")
    with (
        several_here(tmp_path, a={}, b={}) as server,
        server.client() as client,
        ThreadPoolExecutor(2) as pool,
    ):
        with client.stream("POST", "/v1/completions", json=endless("a")) as stream:
            pieces = stream.iter_raw()
            next(pieces)
            other = pool.submit(lambda: answer(ask(client, "b")))
            wait_for_waiting(client, "b", 1)
            slot = server.server.router.find("a")  # type: ignore[union-attr]
            wait_until(lambda: slot.yielding)
            again = pool.submit(lambda: answer(ask(client, "a")))
            wait_for_waiting(client, "a", 1)
            next(pieces)  # it is still served
            assert statuses(client) == {"a": "loaded", "b": "unloaded"}
        assert other.result() == "I am b." and again.result() == "I am a."
    assert [change for change in server.changes if change[1].startswith("unloaded")][:1] == [("a", "unloaded: evicted")]


def test_a_pinned_model_is_loaded_at_the_start_and_stays(tmp_path: Path) -> None:
    with several_here(tmp_path, a={"pinned": True, "unload-after": 0}, b={}, c={}) as server, server.client() as client:
        assert statuses(client) == {"a": "loaded", "b": "unloaded", "c": "unloaded"}
        for name in "bcb":
            assert answer(ask(client, name)) == f"I am {name}."
        assert statuses(client)["a"] == "loaded"
        assert [change for change in server.changes if change[0] == "a" and "unloaded" in change[1]] == []


def test_an_idle_model_is_unloaded_after_its_time_or_at_once(tmp_path: Path) -> None:
    with (
        several_here(tmp_path, "--models-max", "3", a={"unload-after": 0}, b={}) as server,
        server.client() as client,
    ):
        assert answer(ask(client, "a")) == "I am a."
        wait_until(lambda: statuses(client)["a"] == "unloaded")
        assert ("a", "unloaded: idle") in server.changes
        body = {"model": "b", "prompt": "", "keep_alive": "5m", "stream": False}
        assert client.post("/api/generate", json=body).json()["done_reason"] == "load"
        [loaded] = client.get("/api/ps").json()["models"]
        assert loaded["name"] == "b:latest" and not loaded["expires_at"].startswith("9999")
        assert client.post("/api/generate", json={**body, "keep_alive": 0}).json()["done_reason"] == "unload"
        wait_until(lambda: statuses(client)["b"] == "unloaded")
        assert client.get("/api/ps").json() == {"models": []}
        assert client.get("/engine/state").json()["error"]["code"] == "model_unavailable"
        wrong = client.post("/api/generate", json={**body, "keep_alive": "soon"})
        assert wrong.status_code == 400 and "such as 5m" in wrong.json()["error"]


def test_a_model_that_cannot_be_loaded_does_not_disturb_the_others(tmp_path: Path) -> None:
    pipe = hold_load(tmp_path, "bad")
    with (
        several_here(tmp_path, "--models-max", "2", a={}, bad={}) as server,
        server.client() as client,
        ThreadPoolExecutor(2) as pool,
    ):
        assert answer(ask(client, "a")) == "I am a."
        waiting = [pool.submit(ask, client, "bad") for _ in range(2)]
        wait_for_waiting(client, "bad", 2)
        pipe.write_text("no script")
        for response in [each.result() for each in waiting] + [ask(client, "bad")]:
            error = response.json()["error"]
            assert response.status_code == 503 and error["code"] == "model_unavailable"
            assert "could not be loaded: Line 1 of bad.jsonl is not a line of a script" in error["message"]
            assert int(response.headers["retry-after"]) >= 1
        assert statuses(client) == {"a": "loaded", "bad": "failed"}
        assert answer(ask(client, "a")) == "I am a."


def test_requests_that_wait_are_bounded_and_keep_their_deadline(tmp_path: Path) -> None:
    pipe = hold_load(tmp_path, "slow")
    with (
        several_here(tmp_path, "--models-max", "2", "--max-waiting", "1", slow={}, b={}) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        late = ask(client, "slow", timeout_s=0.05)
        assert late.status_code == 504 and late.json()["error"]["code"] == "deadline_expired"
        waiting = pool.submit(ask, client, "slow")
        wait_for_waiting(client, "slow", 1)
        full = ask(client, "slow")
        assert full.status_code == 429 and full.json()["error"]["code"] == "queue_full" and full.headers["retry-after"]
        assert statuses(client) == {"slow": "loading", "b": "unloaded"}
        release_load(pipe)
        assert answer(waiting.result()) == "I am slow."


def test_a_client_that_leaves_while_its_model_loads_waits_no_more(tmp_path: Path) -> None:
    pipe = hold_load(tmp_path, "slow")
    with several_here(tmp_path, slow={}) as server, server.client() as client:
        with pytest.raises(httpx.ReadTimeout):
            ask(httpx.Client(base_url=server.url, timeout=0.2), "slow")
        wait_for_waiting(client, "slow", 0)
        assert client.get("/load").json()["server_load"] == 0
        release_load(pipe)
        wait_until(lambda: statuses(client)["slow"] == "loaded")
        assert answer(ask(client, "slow")) == "I am slow."


def test_a_drain_refuses_what_waits_and_ends_what_runs(tmp_path: Path) -> None:
    """What runs takes seconds: what waits is refused within half a second, and not because the server has stopped."""
    write_slow(tmp_path, "a")
    pipe = hold_load(tmp_path, "slow")
    with (
        several_here(tmp_path, "--models-max", "2", a={}, slow={}) as server,
        server.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        with client.stream("POST", "/v1/completions", json={**endless("a"), "max_tokens": 50}) as stream:
            pieces = stream.iter_raw()
            first = next(pieces)
            waiting = pool.submit(ask, client, "slow")
            wait_for_waiting(client, "slow", 1)
            server.send_signal(signal.SIGTERM)
            refused = waiting.result()
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert (first + b"".join(pieces)).endswith(b"data: [DONE]\n\n")
        releasing = threading.Thread(target=release_load, args=[pipe], daemon=True)  # the engine's thread ends by it
        releasing.start()
        server.wait()


def test_the_limit_of_a_key_is_for_all_models(tmp_path: Path) -> None:
    write_slow(tmp_path, "a")
    (tmp_path / "keys").write_text("sk-one max_open=1\n")
    arguments = ("--models-max", "2", "--api-key-file", str(tmp_path / "keys"))
    with (
        several_here(tmp_path, *arguments, a={}, b={}) as server,
        server.client(headers={"authorization": "Bearer sk-one"}) as client,
    ):
        assert client.get("/ready").status_code == 200
        with client.stream("POST", "/v1/completions", json=endless("a")) as stream:
            pieces = stream.iter_raw()  # once it is collected its connection is closed
            next(pieces)
            refused = ask(client, "b")
            assert refused.status_code == 429 and refused.json()["error"]["code"] == "share_exhausted"
        wait_until(lambda: client.get("/load").json()["server_load"] == 0)
        assert answer(ask(client, "b")) == "I am b."
        with server.client() as stranger:
            assert ask(stranger, "a").status_code == 401


def test_every_endpoint_has_its_way_to_a_model() -> None:
    for endpoint in ENDPOINTS:
        ways = [endpoint.path in group for group in (SHARED, BY_QUERY, OF_ENGINE, HANDLERS)]
        by_body = endpoint.method == "POST" and endpoint.body is not None
        assert sum(ways) == 1 or (not any(ways) and by_body), endpoint.path
    paths = {endpoint.path for endpoint in ENDPOINTS}
    assert SHARED | BY_QUERY | OF_ENGINE | HANDLERS.keys() <= paths


def test_keep_alive_is_read_as_ollama_reads_it() -> None:
    values = {0: 0.0, 2.5: 2.5, "0": 0.0, "30": 30.0, "5m": 300.0, "1h30m": 5400.0, "250ms": 0.25}
    assert {given: keep_alive_s(given) for given in values} == values
    assert [keep_alive_s(given) for given in (-1, "-1", "-5m", -0.5)] == [None] * 4
    for wrong in (True, None, "soon", "5 m", "", [5]):
        with pytest.raises(InvalidParameter, match="such as 5m"):
            keep_alive_s(wrong)
