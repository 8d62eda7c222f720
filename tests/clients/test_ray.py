"""`quire serve --ray` and `quire.ray.app` with the real Ray: scripted engines on a cluster of this machine.

Ray has an environment of its own; quire and its other packages are those of the checkout.
"""

import json
import os
import shutil
import signal
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
import yaml

from tests import children
from tests.architecture.tree import ROOT
from tests.clients.client_server import serving
from tests.clients.environments import SCRIPTS, environment, errors, outcomes
from tests.clients.test_routers import free_port

LINES = """{"step_ms": 20}
{"say": "on and on ", "end": false, "when": "endless"}
{"say": "I see."}
"""
ADMIN = {"x-api-key": "sk-admin"}
START_S = 60.0
NUM_TALKS, NUM_TURNS = 8, 4


class Cluster(NamedTuple):
    """A running cluster of one node with six CPUs, more than the machine may have: scripted engines need few."""

    python: str
    env: dict[str, str]
    script: Path


def ray_python() -> str:
    """Of an environment with Ray in it, and behind it quire, all other packages of this one, and NIXL if there is."""
    try:
        home = environment("ray")
    except AssertionError as error:
        pytest.skip(f"Ray could not be installed: {str(error)[-300:]}")
    (packages,) = home.glob("lib/python*/site-packages")
    folders = [str(ROOT / "src"), sysconfig.get_path("purelib"), *nixl_packages()]
    (packages / "quire-checkout.pth").write_text("\n".join(folders) + "\n")
    return str(home / "bin" / "python")


def nixl_packages() -> list[str]:
    try:
        home = environment("nixl", "--no-deps")
    except AssertionError:
        return []
    return [str(each) for each in home.glob("lib/python*/site-packages")]


def wait_for(what: str, is_so: Callable[[], bool], limit_s: float = START_S) -> None:
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"{what}: not within {limit_s} s"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[Cluster]:
    python = ray_python()
    script = tmp_path_factory.mktemp("script") / "script.jsonl"
    script.write_text(LINES)
    folder = tempfile.mkdtemp(prefix="ray-")  # short: it has sockets
    address = f"127.0.0.1:{free_port()}"
    command = [str(Path(python).with_name("ray")), "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    command += [f"--port={address.split(':')[1]}", f"--ray-client-server-port={free_port()}", "--num-cpus=6"]
    command += [f"--temp-dir={folder}", "--include-dashboard=false", "--object-store-memory=80000000"]
    env = {**os.environ, "RAY_ADDRESS": address, "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}
    env |= {"RAY_worker_niceness": "0", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60"}  # of busy machines
    log = Path(folder) / "start.log"
    with log.open("w") as said, children.started(command, stdout=said, stderr=said, env=env) as process:
        try:
            wait_for("ray start", lambda: "Ray runtime started" in log.read_text() or process.poll() is not None)
            assert process.poll() is None, log.read_text()[-2000:]
            yield Cluster(python, env, script)
        finally:
            process.terminate()
            process.wait(30)
    shutil.rmtree(folder, ignore_errors=True)


class RayServer(NamedTuple):
    client: httpx.Client

    def replicas(self) -> list[dict[str, object]]:
        rows: list[dict[str, object]] = self.client.get("/load").json()["replicas"]
        return rows

    def num_ready(self) -> int:
        return sum(row["health"] == "ready" for row in self.replicas())

    def complete(self, prompt: str, max_tokens: int = 8) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": max_tokens})

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


@contextmanager
def ray_serving(cluster: Cluster, *flags: str) -> Iterator[RayServer]:
    small = ("--script", str(cluster.script), "--threads", "1", "--max-model-len", "4k", "--admin-key", "sk-admin")
    program = (cluster.python, "-m", "quire")
    with (
        serving("--ray", *small, *flags, program=program, env=cluster.env) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False, limits=httpx.Limits(max_connections=200)) as client,
    ):
        yield RayServer(client)


@pytest.fixture(scope="module")
def server(cluster: Cluster) -> Iterator[RayServer]:
    flags = ("--min-replicas", "2", "--max-replicas", "3", "--max-num-seqs", "4", "--downscale-delay", "4")
    with ray_serving(cluster, *flags) as server:
        assert server.num_ready() == 2
        yield server


def engine_processes(cluster: Cluster) -> list[int]:
    """The engines that the workers of this cluster have started."""
    found, programs = [], str(Path(cluster.python).parent).encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[0].startswith(programs) and words[1:3] == [b"-m", b"quire.engine.engine_main"]:
                found.append(int(folder.name))
    return found


@pytest.mark.timeout(900)  # the first run makes the environment
def test_a_conversation_stays_with_its_replica_and_all_have_some(server: RayServer) -> None:
    talks = [
        [{"role": "user", "content": f"{number} is the number of this talk. " * 40}] for number in range(NUM_TALKS)
    ]

    def say(talk: list[dict[str, str]]) -> float:
        """The part of the prompt that was cached."""
        reply = server.client.post("/v1/chat/completions", json={"messages": talk, "max_tokens": 4}).json()
        talk += [reply["choices"][0]["message"], {"role": "user", "content": "And then?"}]
        usage = reply["usage"]
        return float(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])

    sticky = 0
    for turn in range(NUM_TURNS):
        with ThreadPoolExecutor(NUM_TALKS) as pool:
            cached = list(pool.map(say, talks))
        sticky += sum(part > 0.7 for part in cached) if turn else 0
    assert sticky >= 0.9 * NUM_TALKS * (NUM_TURNS - 1)
    served = [int(str(row["num_submitted"])) for row in server.replicas()]
    assert sum(served) == NUM_TALKS * NUM_TURNS and min(served) >= 10, served


class Streamed(NamedTuple):
    num_chunks: int
    failed: bool


def streamed(server: RayServer, prompt: str) -> Streamed:
    """How many chunks came, and whether an error did."""
    num_chunks = 0
    body = {"prompt": prompt, "max_tokens": 40, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            return Streamed(0, True)
        for line in response.iter_lines():
            if line.startswith("data: {"):
                if "error" in json.loads(line[6:]):
                    return Streamed(num_chunks, True)
                num_chunks += 1
    return Streamed(num_chunks, False)


@pytest.mark.timeout(300)
def test_a_killed_replica_loses_no_request_that_has_not_begun(server: RayServer, cluster: Cluster) -> None:
    """24 requests at 8 rows: some run and stream, some wait; half of them are not streamed at all."""
    moved = server.metric("quire_requests_moved_total")
    with ThreadPoolExecutor(24) as pool:
        whole = [pool.submit(server.complete, f"endless {number}", 40) for number in range(12)]
        streams = [pool.submit(streamed, server, f"endless {number}") for number in range(12, 24)]
        wait_for("all are open", lambda: sum(int(str(row["num_requests"])) for row in server.replicas()) == 24)
        os.kill(engine_processes(cluster)[0], signal.SIGKILL)
        assert {each.result().status_code for each in whole} == {200}
        lost = [each.result() for each in streams if each.result().failed]
    assert all(each.num_chunks for each in lost), "these had begun"
    assert server.metric("quire_requests_moved_total") > moved
    wait_for("it is replaced", lambda: server.num_ready() >= 2)


@pytest.mark.timeout(300)
def test_replicas_come_with_the_queue_and_go_without_it(server: RayServer) -> None:
    over = threading.Event()

    def work(number: int) -> set[int]:
        statuses = set()
        while not over.is_set():
            statuses.add(server.complete(f"endless {number}", 20).status_code)
        return statuses

    with ThreadPoolExecutor(20) as pool:
        working = [pool.submit(work, number) for number in range(20)]
        wait_for("a third replica", lambda: server.num_ready() == 3)
        over.set()
        assert {status for each in working for status in each.result()} == {200}
    wait_for("two are enough", lambda: len(server.replicas()) == 2 and server.num_ready() == 2)


@pytest.mark.timeout(300)
def test_a_rolling_restart_loses_no_request(server: RayServer, cluster: Cluster) -> None:
    before = set(engine_processes(cluster))
    with ThreadPoolExecutor(1) as pool:
        restarting = pool.submit(server.client.post, "/rolling_restart", headers=ADMIN)
        statuses = set()
        while not restarting.done():
            statuses.add(server.complete("endless", 20).status_code)
    assert restarting.result().json() == {"restarted": 2} and statuses == {200}
    assert len(before) == 2 and not before & set(engine_processes(cluster))


@pytest.mark.timeout(300)
def test_prefill_and_decode_engines_are_two_pools(cluster: Cluster) -> None:
    """Blocks over NIXL; each engine is killed once, and no request is lost."""
    if not nixl_packages():
        pytest.skip("NIXL could not be installed")
    others = set(engine_processes(cluster))
    flags = ("--min-replicas", "2", "--prefill-engines", "1", "--kv-transport", "nixl", "--max-num-seqs", "4")
    with ray_serving(cluster, *flags) as server, ThreadPoolExecutor(12) as pool:
        wait_for("all are ready", lambda: server.num_ready() == 3)
        assert sorted(str(row["role"]) for row in server.replicas()) == ["decode", "decode", "prefill"]

        def send_all(turn: int) -> list[Future[httpx.Response]]:
            prompts = [f"{turn} and {number} begin this long prompt. " * 100 for number in range(12)]
            return [pool.submit(server.complete, prompt, 4) for prompt in prompts]

        assert {each.result().status_code for each in send_all(0)} == {200}
        assert server.metric("quire_requests_split_total") > 0
        assert server.metric("quire_requests_prefill_fallback_total") == 0
        for turn, engine in enumerate(set(engine_processes(cluster)) - others, 1):
            sent = send_all(turn)
            os.kill(engine, signal.SIGKILL)
            assert {each.result().status_code for each in sent} == {200}
            wait_for("it is replaced", lambda: server.num_ready() == 3)
        split = server.metric("quire_requests_split_total")
        assert {each.result().status_code for each in send_all(9)} == {200}
        assert server.metric("quire_requests_split_total") > split
        wait_for("no block is held", lambda: all(row["num_held_blocks"] == 0 for row in server.replicas()))


@pytest.mark.timeout(300)
def test_what_the_cluster_does_not_have_is_refused_in_one_sentence(cluster: Cluster) -> None:
    flags = ("--script", str(cluster.script), "--ray", "--device", "cuda", "--port", "0")
    command = [cluster.python, "-m", "quire", "serve", *flags]
    done = children.run(command, env=cluster.env, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "A replica needs 1 CPU and 1 GPU on one node, and the nodes of the Ray cluster have at most 6" in done.stderr


@pytest.mark.timeout(300)
def test_the_application_for_ray_serve(cluster: Cluster) -> None:
    command = ("env", f"RAY_ADDRESS={cluster.env['RAY_ADDRESS']}", cluster.python, str(SCRIPTS / "use_ray_serve.py"))
    assert errors(outcomes(*command, str(cluster.script), str(free_port()))) == {}


@pytest.mark.timeout(900)
def test_the_options_of_the_serve_file_are_those_of_the_application() -> None:
    (described,) = yaml.safe_load((ROOT / "deploy" / "ray" / "serve.yaml").read_text())["applications"]
    code = f"from quire.ray import read_options; print(read_options({described['args']!r})['max_replicas'])"
    done = children.run([ray_python(), "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == f"{described['args']['max-replicas']}\n", done.stderr[-2000:]
