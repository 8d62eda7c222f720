"""OpenTelemetry tracing: a span per HTTP request, a span per prompt below it, and its phases below that.

    POST /v1/chat/completions ──▶ chat MODEL ──▶ queue, prefill, decode

Spans are made when a request ends, from times that are recorded anyway, and sent from a thread of their own: no request
waits for a collector. The only file that depends on OpenTelemetry; imported only with `--otlp-endpoint`.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.engine.outputs import RequestMetrics
from quire.server.async_engine import FinishedRequest
from quire.server.http.errors import CLIENT_LEFT
from quire.server.http.request_context import RouteNames, context_of, patterns, route_path
from quire.server.server import PromptName, ServedApplication
from quire.version import __version__

_PROVIDER = "quire"
_TRACED = ("traceparent", "tracestate")
_QUIET = frozenset({"/health", "/ready", "/load", "/metrics"})  # polled every few seconds
_MAX_UNCLAIMED = 4096  # ended prompts whose HTTP request is still open, or open ones whose request has ended
_FLUSH_MS = 2000
_OPERATIONS = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}  # all the rest chat


class Tracing:
    """The spans of one server."""

    def __init__(self, processor: SpanProcessor) -> None:
        resource = Resource.create({"service.name": _PROVIDER, "service.version": __version__})
        self._provider = TracerProvider(resource=resource)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer(_PROVIDER, __version__)
        self._ended: dict[PromptName, FinishedRequest] = {}
        self._background: dict[PromptName, Callable[[FinishedRequest], None]] = {}  # they outlive their HTTP request

    def finished(self, model: str, end: FinishedRequest) -> None:
        """A prompt of a model has ended; its HTTP request ends soon after, or has ended."""
        prompt = PromptName(model, end.state.number)
        trace = self._background.pop(prompt, None)
        if trace is not None:
            trace(end)
            return
        self._ended[prompt] = end
        if len(self._ended) > _MAX_UNCLAIMED:
            del self._ended[next(iter(self._ended))]

    def around(self, app: ASGIApp, server: ServedApplication) -> ASGIApp:
        """The application, with a span around each request."""
        return _TracedApp(app, server, self._tracer, self._ended, self._background)

    def close(self) -> None:
        """Send the remaining spans, for at most `_FLUSH_MS`."""
        self._provider.force_flush(_FLUSH_MS)
        self._provider.shutdown()


def open_tracing(endpoint: str) -> Tracing:
    """Spans to a collector at its base URL, or at the whole URL if that has a path."""
    url = endpoint.rstrip("/")
    url = url if urlsplit(url).path else url + "/v1/traces"
    return Tracing(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_FLUSH_MS / 1000)))


class _TracedApp:
    """ASGI: outermost, so that refusals of the middleware are traced too."""

    def __init__(
        self,
        app: ASGIApp,
        server: ServedApplication,
        tracer: Tracer,
        ended: dict[PromptName, FinishedRequest],
        background: dict[PromptName, Callable[[FinishedRequest], None]],
    ) -> None:
        self._app = app
        self._server = server
        self._tracer = tracer
        self._ended = ended
        self._background = background
        self._names = RouteNames(patterns(server.app.routes))
        self._epoch_ns = time.time_ns() - time.monotonic_ns()  # from the monotonic clock to Unix time

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._names.name(route_path(scope)) if scope["type"] == "http" else ""
        if not route or route in _QUIET:
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        caller = TraceContextTextMapPropagator().extract({name: headers[name] for name in _TRACED if name in headers})
        span = self._tracer.start_span(f"{scope['method']:.20} {route}", caller, SpanKind.SERVER)
        status = CLIENT_LEFT

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            self._close(span, scope, route, status)

    def _close(self, span: Span, scope: Scope, route: str, status: int) -> None:
        request_id = context_of(scope).request_id
        for prompt in self._server.prompts_of(request_id):
            end = self._ended.pop(prompt, None)
            trace = partial(self._trace_prompt, span, _OPERATIONS.get(route, "chat"), prompt.model)
            if end is not None:
                trace(end)
            else:
                self._background[prompt] = trace
                if len(self._background) > _MAX_UNCLAIMED:
                    del self._background[next(iter(self._background))]
        span.set_attributes(
            {
                "http.request.method": f"{scope['method']:.20}",
                "http.route": route,
                "http.response.status_code": status,
                "quire.request_id": request_id,
            }
        )
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
            span.set_attribute("error.type", str(status))
        span.end()

    def _trace_prompt(self, parent: Span, operation: str, model: str, end: FinishedRequest) -> None:
        """The span of a prompt, and one for each of its phases."""
        times = end.state.metrics
        attributes = _attributes(end, operation, model)
        begun, ended = self._ns(times.arrival_s), self._ns(times.finished_s or times.arrival_s)
        context = set_span_in_context(parent)
        span = self._tracer.start_span(f"{operation} {model}", context, start_time=begun, attributes=attributes)
        if end.failure is not None:
            span.set_attribute("error.type", end.failure.code)
            span.set_status(Status(StatusCode.ERROR, end.failure.code))
        within = set_span_in_context(span)
        for name, (start_s, stop_s) in _phases(times).items():
            self._tracer.start_span(name, within, start_time=self._ns(start_s)).end(self._ns(stop_s))
        span.end(ended)

    def _ns(self, moment_s: float) -> int:
        return self._epoch_ns + int(moment_s * 1e9)


def _phases(times: RequestMetrics) -> dict[str, tuple[float, float]]:
    """Start and end of queue, prefill and decode, as far as the prompt came."""
    moments = (times.arrival_s, times.seated_s, times.first_token_s, times.finished_s)
    phases: dict[str, tuple[float, float]] = {}
    for name, start_s, stop_s in zip(("queue", "prefill", "decode"), moments, moments[1:], strict=False):
        if start_s is not None and stop_s is not None:
            phases[name] = (start_s, stop_s)
    return phases


def _attributes(end: FinishedRequest, operation: str, model: str) -> Mapping[str, str | int | float | list[str]]:
    """By OpenTelemetry's conventions for generative models, where they exist. No prompt or output text."""
    state, params = end.state, end.state.params
    attributes: dict[str, str | int | float | list[str]] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": len(state.prompt_ids),
        "gen_ai.usage.cache_read.input_tokens": state.metrics.num_cached_tokens,
        "gen_ai.usage.output_tokens": sum(len(sequence.token_ids) for sequence in state.sequences),
        "quire.num_preemptions": state.metrics.num_preemptions,
    }
    if operation != "embeddings":
        attributes["gen_ai.request.temperature"] = float(params.temperature)
        attributes["gen_ai.request.top_p"] = float(params.top_p)
        attributes["gen_ai.request.choice.count"] = params.n
        if params.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if end.output is not None:
        attributes["gen_ai.response.finish_reasons"] = [str(each.finish_reason) for each in end.output.outputs]
    return attributes
