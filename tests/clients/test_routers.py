"""The routers of vLLM and SGLang, each in front of two scripted servers with keys: what they add, read and balance."""

import re
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import yaml

from tests import children
from tests.architecture.tree import ROOT
from tests.clients.client_server import SMALL, scripted
from tests.clients.client_world import KEY, MODEL
from tests.clients.environments import environment

PAGE = (ROOT / "docs" / "routers.md").read_text()
WORKERS = ("one", "two")
NUM_CONVERSATIONS, NUM_TURNS = 6, 4
START_S = 60.0


class Router(NamedTuple):
    """A router that runs, and its workers."""

    name: str
    client: httpx.Client
    workers: dict[str, str]  # what each says, and its address


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def command_of(name: str, port: int, urls: list[str]) -> list[str]:
    """The command that the page shows, with these addresses."""
    (shown,) = re.findall(rf"^{name} .*$", PAGE, re.MULTILINE)
    words: list[str] = shown.replace("sk-me", KEY).split()
    at = words.index("http://127.0.0.1:8001")
    words[at : at + 2] = urls
    words[words.index("30000")] = str(port)
    metrics_port = ["--prometheus-port", str(free_port())]
    return [str(environment(name) / "bin" / words[0]), *words[1:], *metrics_port]


def wait_until_served(client: httpx.Client, process: "subprocess.Popen[str]") -> None:
    """Until the router knows its workers' model, or has ended."""
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        assert process.poll() is None, "the router ended"
        try:
            if MODEL in client.get("/v1/models").text:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"the router has no model after {START_S} s")


@contextmanager
def routed(name: str, folder: Path) -> Iterator[Router]:
    keys = folder / "keys"
    keys.write_text(f"{KEY} name=client\n")
    flags = (*SMALL, "--api-key-file", str(keys), "--served-model-name", MODEL)
    with ExitStack() as stack:
        urls = {}
        for worker in WORKERS:
            (folder / worker).mkdir()
            urls[worker] = stack.enter_context(scripted(folder / worker, [{"step_ms": 50}, {"say": worker}], *flags))
        port = free_port()
        command = command_of(name, port, list(urls.values()))
        log = stack.enter_context((folder / "router.log").open("w"))
        process = stack.enter_context(children.started(command, stdout=log, stderr=log, text=True))
        headers = {"authorization": f"Bearer {KEY}"}
        client = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=headers, timeout=60, trust_env=False)
        )
        try:
            wait_until_served(client, process)
            yield Router(name, client, urls)
        finally:
            process.terminate()
            process.wait(60)


@pytest.fixture(scope="module", params=["vllm-router", "sglang-router"])
def router(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, default_model_path: Path
) -> Iterator[Router]:
    with routed(request.param, tmp_path_factory.mktemp(request.param)) as router:
        yield router


def chat(router: Router, messages: list[dict[str, str]], **fields: object) -> httpx.Response:
    return router.client.post("/v1/chat/completions", json={"model": MODEL, "messages": messages, **fields})


def counted(router: Router, worker: str, name: str) -> float:
    page = httpx.get(f"{router.workers[worker]}/metrics", headers={"x-api-key": KEY}, trust_env=False).text
    return sum(float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if line.startswith(f"{name}"))


@pytest.mark.timeout(900)  # the first run makes the environment
def test_what_a_router_adds_to_a_request_is_not_refused(router: Router) -> None:
    said = chat(router, [{"role": "user", "content": "hi"}], max_tokens=8)
    assert said.status_code == 200, said.text
    assert said.json()["choices"][0]["message"]["content"] in WORKERS
    streamed = chat(router, [{"role": "user", "content": "hi"}], max_tokens=8, stream=True)
    assert streamed.status_code == 200 and streamed.text.rstrip().endswith("data: [DONE]")
    text = router.client.post("/v1/completions", json={"model": MODEL, "prompt": "hi", "max_tokens": 8})
    assert text.status_code == 200, text.text
    assert text.json()["choices"][0]["text"] in WORKERS


@pytest.mark.timeout(900)
def test_an_error_of_a_worker_reaches_the_client(router: Router) -> None:
    refused = chat(router, [{"role": "user", "content": "hi"}], temperature=-1.0)
    assert refused.status_code == 400, refused.text
    assert "temperature" in refused.text


def reply(router: Router, turns: list[str]) -> str:
    """What a worker says in a conversation. vllm-router 0.1.16 does not read the messages of a chat, but prompts."""
    if router.name == "vllm-router":
        body = {"model": MODEL, "prompt": "\n".join(turns), "max_tokens": 4}
        return str(router.client.post("/v1/completions", json=body).json()["choices"][0]["text"])
    roles = ("user", "assistant") * len(turns)
    messages = [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return str(chat(router, messages, max_tokens=4).json()["choices"][0]["message"]["content"])


@pytest.mark.timeout(900)
def test_a_conversation_stays_with_its_worker_and_both_have_some(router: Router) -> None:
    """In rounds of all at once: other conversations are between two turns of each, and there is load to balance."""
    talks = [[f"{number} is the number of this conversation. " * 20] for number in range(NUM_CONVERSATIONS)]
    served: list[list[str]] = [[] for _ in talks]
    hits = sum(counted(router, worker, "quire_prefix_cache_hits_total") for worker in WORKERS)
    for turn in range(NUM_TURNS):
        with ThreadPoolExecutor(NUM_CONVERSATIONS) as pool:
            replies = list(pool.map(lambda turns: reply(router, turns), talks))
        for turns, by, said in zip(talks, served, replies, strict=True):
            by.append(said)
            turns += [said, f"And turn {turn}?"]
    sticky = sum(by[turn] == by[0] for by in served for turn in range(1, NUM_TURNS))
    assert sticky >= 0.9 * NUM_CONVERSATIONS * (NUM_TURNS - 1), served
    begun = Counter(by[0] for by in served)
    assert min(begun[worker] for worker in WORKERS) >= 2, begun
    now = sum(counted(router, worker, "quire_prefix_cache_hits_total") for worker in WORKERS)
    assert now - hits > 100 * NUM_CONVERSATIONS * (NUM_TURNS - 2), "the workers found the conversations in their caches"


@pytest.mark.timeout(900)
def test_a_router_reads_what_it_asks_for(router: Router) -> None:
    workers = router.client.get("/workers").json()["workers"]
    assert [worker["is_healthy"] for worker in workers] == [True, True]
    loads = router.client.get("/get_loads").json()["workers"]
    assert {load["worker"] for load in loads} == set(router.workers.values())
    if router.name == "sglang-router":
        assert {worker["model_id"] for worker in workers} == {MODEL}
        assert {worker["metadata"]["model_path"] for worker in workers} == {MODEL}
        assert all(load["load"] >= 0 for load in loads), loads


@pytest.mark.timeout(900)
def test_the_router_of_the_kubernetes_files_has_their_flags() -> None:
    files = yaml.safe_load_all((ROOT / "deploy" / "kubernetes" / "router" / "router.yaml").read_text())
    [deployment] = [each for each in files if each["kind"] == "Deployment"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    program = str(environment("vllm-router") / "bin" / container["command"][0])
    shown = children.run([program, "--help"], capture_output=True, text=True, check=True).stdout
    assert {arg.partition("=")[0] for arg in container["args"]} <= set(re.findall(r"--[a-z][a-z-]+", shown))
