"""Tracing: spans below the client's own, the phases of each prompt, and a collector that hangs."""

import asyncio
import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import children

pytest.importorskip("opentelemetry.sdk.trace", reason='needs pip install "quire[otel]"')

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from quire.config import EngineConfig
from quire.engine.open_model import OpenedModel, open_model
from quire.server.batch.lines import BatchReply
from quire.server.batch.runner import post
from quire.server.http.auth import KeyRing
from quire.server.http.middleware import secure
from quire.server.server import Server, ServerConfig, ServerObservers
from quire.server.tracing import Tracing, open_tracing
from tests.server.local_server import local_engines, local_server
from tests.server.several_models import answer, ask, several_here

QUIRE = str(Path(sys.executable).with_name("quire"))
SCRIPT = '{"say": "Bang", "break": true, "when": "boom"}\n{"say": "Hello there."}\n'
TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

Send = Callable[..., Awaitable[BatchReply]]


@pytest.fixture(scope="module")
def opened(default_model_path: Path) -> OpenedModel:
    return open_model(EngineConfig())


def traced(
    opened: OpenedModel, folder: Path, talk: Callable[[Send], Awaitable[None]], lines: str = SCRIPT
) -> list[ReadableSpan]:
    """The spans of requests to a scripted server in this process."""
    script = folder / "script.jsonl"
    script.write_text(lines)
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))

    async def life() -> None:
        ready = asyncio.Event()
        listeners = ServerObservers(lambda phase: None, lambda model, info: ready.set(), lambda line: None, tracing)
        server = Server(ServerConfig(opened, EngineConfig(), str(script)), listeners)
        app = tracing.around(secure(server.app, keys=KeyRing(), admission=server.app), server)
        keeping = asyncio.create_task(server.run_engine())

        async def send(path: str, headers: tuple[tuple[bytes, bytes], ...] = (), **body: object) -> BatchReply:
            return await post(app, path, json.dumps(body).encode(), headers)

        try:
            async with asyncio.timeout(60):
                await ready.wait()
                await talk(send)
        finally:
            await server.supervisor.stop()
            keeping.cancel()

    with local_engines():
        asyncio.run(life())
    return list(exporter.get_finished_spans())


def named(spans: list[ReadableSpan], name: str) -> ReadableSpan:
    [span] = [span for span in spans if span.name == name]
    return span


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_chat_is_a_span_below_the_clients_own(opened: OpenedModel, tmp_path: Path) -> None:
    async def talk(send: Send) -> None:
        headers = ((b"traceparent", f"00-{TRACE}-{CALLER}-01".encode()),)
        reply = await send("/v1/chat/completions", headers, messages=[{"role": "user", "content": "hi"}], max_tokens=9)
        assert reply.status == 200
        await send("/health")

    spans = traced(opened, tmp_path, talk)
    assert {f"{span.context.trace_id:032x}" for span in spans} == {TRACE}
    outer = named(spans, "POST /v1/chat/completions")
    assert outer.kind is SpanKind.SERVER and outer.parent is not None and f"{outer.parent.span_id:016x}" == CALLER
    assert attributes(outer)["http.response.status_code"] == 200 and outer.status.status_code is StatusCode.UNSET
    inner = named(spans, "chat smollm2-135m-instruct")
    assert inner.parent is not None and inner.parent.span_id == outer.context.span_id
    inner_attributes = attributes(inner)
    assert (
        inner_attributes["gen_ai.request.model"] == "smollm2-135m-instruct"
        and inner_attributes["gen_ai.operation.name"] == "chat"
    )
    assert inner_attributes["gen_ai.usage.input_tokens"] > inner_attributes["gen_ai.usage.output_tokens"] > 0
    assert (
        inner_attributes["gen_ai.response.finish_reasons"] == ("stop",)
        and inner_attributes["gen_ai.request.max_tokens"] == 9
    )
    parts = [named(spans, name) for name in ("queue", "prefill", "decode")]
    assert len(spans) == 5 and all(part.parent.span_id == inner.context.span_id for part in parts if part.parent)
    edges = [moment for part in parts for moment in (part.start_time, part.end_time)]
    assert edges == sorted(edges) and edges[0] == inner.start_time and edges[-1] == inner.end_time
    assert outer.start_time <= inner.start_time and inner.end_time <= outer.end_time


def test_a_background_response_is_traced_when_it_ends(opened: OpenedModel, tmp_path: Path) -> None:
    script = '{"step_ms": 30}\n' + SCRIPT  # it outlives its request

    async def talk(send: Send) -> None:
        first = await send("/v1/responses", input="hi", background=True)
        assert first.status == 200 and json.loads(first.body)["status"] == "queued"
        while (
            await send("/v1/responses", input="more", previous_response_id=json.loads(first.body)["id"])
        ).status != 200:
            await asyncio.sleep(0.01)

    spans = traced(opened, tmp_path, talk, script)
    outer = min((span for span in spans if span.name == "POST /v1/responses"), key=lambda span: span.start_time or 0)
    inner = [span for span in spans if span.name == "chat smollm2-135m-instruct"]
    [background] = [span for span in inner if span.parent is not None and span.parent.span_id == outer.context.span_id]
    assert len(inner) == 2 and (background.end_time or 0) > (outer.end_time or 0)


def test_several_prompts_refusals_and_failures(opened: OpenedModel, tmp_path: Path) -> None:
    async def talk(send: Send) -> None:
        assert (await send("/v1/embeddings", input=["a", "b", "c"])).status == 200
        assert (await send("/v1/completions", prompt="boom")).status == 500
        assert (await send("/v1/completions", prompt="x", model="gpt-5")).status == 404
        assert (await send("/v1/nothing", ((b"traceparent", b"nonsense"),))).status == 404

    spans = traced(opened, tmp_path, talk)
    embedded = [span for span in spans if span.name == "embeddings smollm2-135m-instruct"]
    assert len(embedded) == 3 and all(attributes(span)["gen_ai.usage.output_tokens"] == 0 for span in embedded)
    failed = named(spans, "text_completion smollm2-135m-instruct")
    assert failed.status.status_code is StatusCode.ERROR and attributes(failed)["error.type"] == "numerical_error"
    completions = [span for span in spans if span.name == "POST /v1/completions"]
    assert [attributes(span)["http.response.status_code"] for span in completions] == [500, 404]
    assert [span.status.status_code for span in completions] == [StatusCode.ERROR, StatusCode.UNSET]
    assert attributes(named(spans, "POST other"))["http.route"] == "other"


class _Collector(http.server.BaseHTTPRequestHandler):
    """Keeps the requests."""

    def do_POST(self) -> None:
        assert isinstance(self.server, _Collecting)
        self.server.got.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing."""


class _Collecting(http.server.ThreadingHTTPServer):
    got: list[tuple[str, bytes]]


@pytest.fixture
def collector() -> Iterator[_Collecting]:
    server = _Collecting(("127.0.0.1", 0), _Collector)
    server.got = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def serve_once(endpoint: str, folder: Path) -> None:
    """Start, send one request, stop by SIGTERM."""
    script = folder / "script.jsonl"
    script.write_text(SCRIPT)
    command = [QUIRE, "serve", "--port", "0", "--script", str(script), "--otlp-endpoint", endpoint]
    with children.started(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = next(line for line in process.stderr if line.startswith("Ready"))
        url = ready.split()[5]
        response = httpx.post(f"{url}/v1/completions", json={"prompt": "hi"}, timeout=30)
        assert response.status_code == 200
        process.terminate()
        assert process.wait(30) == 0


def test_a_collector_gets_the_spans(default_model_path: Path, tmp_path: Path, collector: _Collecting) -> None:
    serve_once(f"http://127.0.0.1:{collector.server_port}", tmp_path)
    assert {path for path, _ in collector.got} == {"/v1/traces"}
    sent = b"".join(body for _, body in collector.got)
    assert b"text_completion smollm2-135m-instruct" in sent and b"gen_ai.usage.output_tokens" in sent


def test_the_span_of_a_prompt_names_its_model(default_model_path: Path, tmp_path: Path) -> None:
    """Each of several models numbers its own prompts, so both of these have the same number."""
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter))
    with (
        several_here(tmp_path, "--models-max", "2", tracer=tracing, one={}, two={}) as server,
        server.client() as client,
    ):
        for name in ("one", "two"):
            assert answer(ask(client, name)) == f"I am {name}."
        assert ask(client, "three").status_code == 404
    spans = {span.name: span for span in exporter.get_finished_spans() if span.name.startswith("chat ")}
    assert set(spans) == {"chat one", "chat two"}
    assert [attributes(spans[f"chat {name}"])["gen_ai.request.model"] for name in ("one", "two")] == ["one", "two"]
    outer = {span.context.span_id for span in exporter.get_finished_spans() if span.name.startswith("POST /v1/chat")}
    assert len(outer) == 3 and all(span.parent is not None and span.parent.span_id in outer for span in spans.values())


def test_no_request_waits_for_a_hanging_collector(default_model_path: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, and never answers
        tracing = open_tracing(f"http://127.0.0.1:{silent.getsockname()[1]}")
        with (
            contextlib.closing(tracing),
            local_server(tmp_path, [{"say": "Hello there."}], tracer=tracing) as server,
            server.client() as client,
        ):
            assert client.post("/v1/completions", json={"prompt": "hi"}).status_code == 200
