"""The application of several models: routes each request to its model, and answers for all of them.

The model is the field `model` of the body, which is complete when the request gets here, or the parameter `model` of
the query; without one it is the first. The request waits until its model is loaded, takes its place there, and is
handled by that model's own application. Lists, stored responses and monitoring need no model to be loaded.
"""

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial

import msgspec
from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.samples import Sample
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from quire.core.errors import Draining, InvalidParameter, shown
from quire.server.admin import AbortBody, UnknownRequest, loads, own_name, stream_states
from quire.server.admission import ServerPaused, ShareExhausted, client_of, timeout_header
from quire.server.app import ENDPOINTS, Application, Endpoint
from quire.server.engine_state import EngineState
from quire.server.engine_supervisor import Health
from quire.server.fair_shares import Client, FairShares
from quire.server.http.errors import is_ollama, sanitized
from quire.server.http.request_context import RequestContext, context_of
from quire.server.http.sse import json_response, until_disconnect
from quire.server.metrics import CONTENT_TYPE, Metrics
from quire.server.model_router import ModelRouter, ModelSlot, ModelStatus, ModelUnavailable
from quire.server.ollama.generate import LATEST
from quire.server.ollama.response import OllamaResponse
from quire.server.request.decode import read
from quire.server.server import PromptName

# Endpoints of what all models share: lists, stored responses, files, batches, versions.
SHARED = frozenset(
    {"/v1/responses/{response_id}", "/v1/responses/{response_id}/cancel", "/v1/responses/{response_id}/input_items",
     "/v1/models", "/v1/models/{name:path}", "/api/tags", "/api/ps", "/api/show", "/api/version", "/api/pull",
     "/api/delete", "/api/create", "/api/copy", "/api/push", "/version", "/server_info", "/get_server_info",
     "/model_info", "/get_model_info", "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content",
     "/v1/batches", "/v1/batches/{batch_id}", "/v1/batches/{batch_id}/cancel", "/rolling_restart"}
)  # fmt: skip
# By the parameter `model` of the query. The first ones load it; the others are of an engine as it is.
BY_QUERY = frozenset({"/info", "/props", "/tokenizer_info"})
OF_ENGINE = frozenset({"/slots", "/engine/state", "/engine/requests/{number}/explain"})

_LOADING = ("/api/chat", "/api/generate")  # of Ollama: without a prompt they load or unload a model
_DURATION = re.compile(r"-?(?:\d+(?:\.\d*)?(?:h|ms|m|s))+|-?\d+(?:\.\d*)?")  # as Go writes them
_PARTS = re.compile(r"(\d+(?:\.\d*)?)(h|ms|m|s)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 0.001}
_OF_SERVER = frozenset(  # metrics of the HTTP server, not of a model
    {"quire_http_requests", "quire_log_lines_lost", "quire_stored_responses", "quire_stored_response_bytes"}
)
_OF_BOTH = frozenset({"quire_requests_refused", "quire_slow_readers"})  # before and after the model was known

_UNSET = -1.0  # no keep_alive was given

Handler = Callable[["RoutedServer", Request], Awaitable[Response]]


class RoutedBody(Struct, kw_only=True):
    """What routing reads of a body. The model's own application reads the whole."""

    model: object = None
    timeout_s: object = None
    keep_alive: object = None  # of Ollama
    messages: msgspec.Raw = msgspec.Raw(b"null")
    prompt: msgspec.Raw = msgspec.Raw(b"null")


def keep_alive_s(given: object) -> float | None:
    """Ollama's `keep_alive` in seconds: a number of them, or a text such as 5m or 1h30m. None: below 0, without end."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        raise InvalidParameter(f"keep_alive is {shown(given)}; it may be a number of seconds or a text such as 5m.")
    text = str(given)
    if isinstance(given, str) and not _DURATION.fullmatch(text):
        raise InvalidParameter(f"keep_alive is {shown(given)}; it may be a number of seconds or a text such as 5m.")
    parts = _PARTS.findall(text)
    seconds = sum(float(number) * _SECONDS[unit] for number, unit in parts) if parts else abs(float(text))
    return None if text.startswith("-") else seconds


class TransitPlace:
    """A complete request until its model is known and loaded; then it has a place there."""

    __slots__ = ("_client", "_shares")

    def __init__(self, shares: FairShares, client: Client) -> None:
        self._shares: FairShares | None = shares
        self._client = client

    def add_prompt(self, num_tokens: int) -> None:
        raise AssertionError("prompts are of a place in the queue of a model")

    def start_prompt(self, num_tokens: int) -> None:
        raise AssertionError("prompts are of a place in the queue of a model")

    def end_prompt(self) -> None:
        raise AssertionError("prompts are of a place in the queue of a model")

    def release(self) -> None:
        if self._shares is not None:
            self._shares.release(self._client)
            self._shares = None


class RouterAdmission:
    """What can be said before the model of a request is known: pause, drain, and the limit of its key."""

    def __init__(self, router: ModelRouter) -> None:
        self._router = router
        self._transit = FairShares()
        self.paused = False

    def check(self, client: Client, most: int | None) -> None:
        if self._router.draining:
            raise Draining
        if self.paused:
            raise ServerPaused("The operator has paused this server; try again later.")
        num_open = self.num_held(client) if most is not None else 0
        if most is not None and num_open >= most:
            error = ShareExhausted(num_open, most)
            error.retry_after_s = 1.0
            raise error

    def admit(self, client: Client, most: int | None) -> TransitPlace:
        self.check(client, most)
        self._transit.take(client)
        return TransitPlace(self._transit, client)

    def num_held(self, client: Client) -> int:
        """Requests of a client, for all models."""
        held = (slot.server.state.admission.num_held(client) for slot in self._router.slots)
        return self._transit.held(client) + sum(held)

    @property
    def num_open(self) -> int:
        return self._transit.total + sum(slot.server.state.admission.num_open for slot in self._router.slots)


class RoutedServer:
    """The router as one server: its application, its metrics, and what is drained."""

    def __init__(self, router: ModelRouter, clock: Callable[[], float] = time.monotonic) -> None:
        self.router = router
        self.admission = RouterAdmission(router)
        self.engine = router
        self.watchers = FairShares()  # streams of the state of an engine, of all models
        self.metrics = Metrics(lambda: None, clock)  # of the HTTP server
        self.metrics.stored.set_function(lambda: router.store.num_responses)
        self.metrics.stored_bytes.set_function(lambda: router.store.num_bytes)
        self.app = Application(self.admission, [self._route(endpoint) for endpoint in ENDPOINTS])

    def prompts_of(self, request_id: str) -> tuple[PromptName, ...]:
        """The prompts that came with a request, of whichever model."""
        return tuple(prompt for slot in self.router.slots for prompt in slot.server.prompts_of(request_id))

    def end_watching(self) -> None:
        for slot in self.router.slots:
            slot.server.end_watching()

    async def run_engine(self) -> None:
        await self.router.run()

    async def stop(self) -> None:
        await self.router.stop()

    def _route(self, endpoint: Endpoint) -> Route:
        own = HANDLERS.get(endpoint.path)
        served = RoutedEndpoint(self, endpoint) if own is None else partial(own, self)
        return Route(endpoint.path, served, methods=[endpoint.method])

    def collect(self) -> Iterator[Metric]:
        """The metrics of all models with the label `model`, from the closed set of their names; then those of the
        server. vLLM's names have a label for the model already."""
        merged: dict[str, Metric] = {}
        for slot in self.router.slots:
            for family in slot.server.metrics.collect():
                if family.name not in _OF_SERVER:
                    _add(merged, family, {} if family.name.startswith("vllm:") else {"model": slot.name})
        for family in self.metrics.registry.collect():
            if family.name in _OF_SERVER:
                _add(merged, family, {})
            elif family.name in _OF_BOTH:
                _add(merged, family, {"model": ""})
        yield from merged.values()
        yield from _model_metrics(self.router)


class RoutedEndpoint:
    """ASGI: an endpoint in the application of the model that a request names."""

    def __init__(self, server: RoutedServer, endpoint: Endpoint) -> None:
        self._server = server
        self._router = server.router
        self._endpoint = endpoint
        self._by_query = endpoint.path in BY_QUERY | OF_ENGINE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._endpoint.path
        if path in SHARED:
            await self._router.slots[0].server.app(scope, receive, send)
        elif path in OF_ENGINE:
            await engine_slot(self._router, Request(scope, receive)).server.app(scope, receive, send)
        else:
            await self._loaded(Request(scope, receive), send)

    async def _loaded(self, request: Request, send: Send) -> None:
        """Handle a request when its model is loaded."""
        context, scope = context_of(request.scope), request.scope
        if self._by_query:
            await self._use(self._router.find(request.query_params.get("model")), request, send)
            return
        body = await read(request, RoutedBody)
        slot, keep_s = self._find(body.model), _keep(body.keep_alive, context, self._endpoint)
        if keep_s == 0 and self._endpoint.path in _LOADING and _is_empty(body):
            self._router.keep(slot, keep_s)
            unloaded = OllamaResponse.loaded(str(body.model), is_chat="chat" in self._endpoint.path, reason="unload")
            await json_response(unloaded)(scope, request.receive, send)
            return
        await self._use(slot, request, send, _timeout_s(scope, body, context), keep_s)

    def _find(self, name: object) -> ModelSlot:
        if name is not None and not isinstance(name, str):
            raise InvalidParameter(f"model must be text or left out, not {shown(name)}.", param="model")
        names = self._router.names
        if name is not None and is_ollama(self._endpoint.path) and name not in names:
            name = name.removesuffix(LATEST)
        return self._router.find(name)

    async def _use(
        self,
        slot: ModelSlot,
        request: Request,
        send: Send,
        timeout_s: float | None = None,
        keep_s: float | None = _UNSET,
    ) -> None:
        scope, context = request.scope, context_of(request.scope)
        client = client_of(context.identity, scope)
        began_s = time.monotonic()
        body = await request.body()
        if not self._router.try_acquire(slot):
            await until_disconnect(request, self._router.acquire(slot, client, timeout_s))
        try:
            context.waited_s = time.monotonic() - began_s
            if context.place is not None:
                context.place.release()
                context.place = None
                context.place = slot.server.state.admission.admit(client, None)
            await slot.server.app(scope, _replayed(body, request.receive), send)
        finally:
            if keep_s != _UNSET:
                self._router.keep(slot, keep_s)
            self._router.release(slot)


def engine_slot(router: ModelRouter, request: Request) -> ModelSlot:
    """The model of a request to an engine as it is: the one that it names, or the one that was used last."""
    name = request.query_params.get("model")
    slot = router.latest if name is None else router.find(name)
    if slot.status is not ModelStatus.LOADED:
        raise ModelUnavailable(f"The model {shown(slot.name)} is not loaded: a request that names it loads it.")
    return slot


def _timeout_s(scope: Scope, body: RoutedBody, context: RequestContext) -> float | None:
    """Of a client that may set one. What is not a number is refused by the model's application."""
    header_s = timeout_header(scope)
    given_s = body.timeout_s if header_s is None else header_s
    is_number = isinstance(given_s, int | float) and not isinstance(given_s, bool)
    return max(float(str(given_s)), 0.0) if is_number and context.identity.trusted else None


def _keep(given: object, context: RequestContext, endpoint: Endpoint) -> float | None:
    """How long a model is to stay loaded, of a client that may say so."""
    if given is None or not is_ollama(endpoint.path):
        return _UNSET
    seconds = keep_alive_s(given)
    return seconds if context.identity.trusted else _UNSET


def _is_empty(body: RoutedBody) -> bool:
    return all(bytes(part).strip() in (b"null", b"[]", b'""') for part in (body.messages, body.prompt))


def _replayed(body: bytes, receive: Receive) -> Receive:
    """The messages of a request whose body has been read."""
    unread = [body]

    async def receive_again() -> Message:
        if unread:
            return {"type": "http.request", "body": unread.pop(), "more_body": False}
        return await receive()

    return receive_again


async def health(server: RoutedServer, request: Request) -> Response:
    """Alive unless an engine hangs; it is killed then. Public, so without the names of models."""
    hangs = any(slot.server.supervisor.hangs for slot in server.router.slots)
    status = Health.STALLED if hangs else Health.READY
    return json_response({"status": status.value, **_counts(server.router)}, 503 if hangs else 200)


async def ready(server: RoutedServer, request: Request) -> Response:
    """Whether a request sent now would be served: at once, or when its model is loaded."""
    router = server.router
    status = "draining" if router.draining else "paused" if server.admission.paused else Health.READY.value
    if status == Health.READY.value and not router.is_ready:
        status = Health.STARTING.value
    return json_response({"status": status, **_counts(router)}, 200 if status == Health.READY.value else 503)


def _counts(router: ModelRouter) -> dict[str, int]:
    num_loaded = sum(slot.status is ModelStatus.LOADED for slot in router.slots)
    return {"models": len(router.slots), "models_loaded": num_loaded}


async def load(server: RoutedServer, request: Request) -> Response:
    models: dict[str, object] = {}
    sums = dict.fromkeys(("num_requests_running", "num_requests_waiting", "num_waiting_tokens"), 0)
    for slot, listed in zip(server.router.slots, server.router.listed(), strict=True):
        stats = slot.server.engine.stats
        now = {
            "num_requests_running": 0 if stats is None else stats.num_running,
            "num_requests_waiting": 0 if stats is None else stats.num_waiting,
            "num_waiting_tokens": 0 if stats is None else stats.num_waiting_tokens,
        }
        sums = {name: value + now[name] for name, value in sums.items()}
        state: dict[str, object] = {"status": listed.status, "pinned": slot.config.pinned}
        if slot.status is ModelStatus.LOADED:
            state["engine"] = slot.server.state.health.value
        if listed.reason is not None:
            state["reason"] = sanitized(listed.reason)
        models[slot.name] = {**state, "num_requests_waiting_for_load": len(slot.waiters), **now}
    open_now = {"server_load": server.admission.num_open, "num_requests": server.router.num_requests}
    return json_response({**open_now, **sums, "models": models})


async def get_load(server: RoutedServer, request: Request) -> Response:
    return loads(slot.server.engine.stats for slot in server.router.slots)


async def engine_events(server: RoutedServer, request: Request) -> Response:
    """Of the model that is named. Without a name the stream goes on with another engine when that is used."""

    def find() -> EngineState:
        return engine_slot(server.router, request).server.state.engine_state

    return await stream_states(server.watchers, find, request, own_name(request))


async def metrics(server: RoutedServer, request: Request) -> Response:
    return Response(server.metrics.page(server), media_type=CONTENT_TYPE)


async def explain(server: RoutedServer, request: Request) -> Response:
    request_id = request.path_params["request_id"]
    slot = _slot_of(server.router, request_id)
    numbers = slot.server.engine.numbers_of(request_id)
    if slot.status is not ModelStatus.LOADED:
        raise UnknownRequest(
            f"The model {shown(slot.name)} was unloaded, and its engine's record of this request with it.",
            param="request_id",
        )
    events = [await slot.server.engine.query("explain", number) for number in numbers]
    body = {"id": request_id, "model": slot.name, "requests": [msgspec.Raw(each) for each in events]}
    return json_response(body)


async def abort(server: RoutedServer, request: Request) -> Response:
    body = await read(request, AbortBody)
    engines = [(_slot_of(server.router, request_id).server.engine, request_id) for request_id in body.request_ids]
    ended = [engine.abort(number) for engine, request_id in engines for number in engine.numbers_of(request_id)]
    return json_response({"aborted": sum(ended)})


def _slot_of(router: ModelRouter, request_id: str) -> ModelSlot:
    found = next((slot for slot in router.slots if slot.server.engine.numbers_of(request_id)), None)
    if found is None:
        raise UnknownRequest(
            "No recent request has this id; send the id from the header x-quire-request-id.", param="request_id"
        )
    return found


async def reset_prefix_cache(server: RoutedServer, request: Request) -> Response:
    """Of all models that are loaded."""
    engines = {slot.name: slot.server.engine for slot in server.router.slots if slot.server.engine.attached}
    replies = {name: msgspec.Raw(await engine.query("reset_prefix_cache")) for name, engine in engines.items()}
    return json_response({"models": replies})


async def pause(server: RoutedServer, request: Request) -> Response:
    server.admission.paused = True
    return json_response({"paused": True})


async def resume(server: RoutedServer, request: Request) -> Response:
    server.admission.paused = False
    return json_response({"paused": False})


HANDLERS: dict[str, Handler] = {
    "/health": health,
    "/ready": ready,
    "/load": load,
    "/get_load": get_load,
    "/engine/events": engine_events,
    "/metrics": metrics,
    "/requests/{request_id}/explain": explain,
    "/abort_requests": abort,
    "/reset_prefix_cache": reset_prefix_cache,
    "/pause": pause,
    "/resume": resume,
}


def _add(merged: dict[str, Metric], family: Metric, label: dict[str, str]) -> None:
    into = merged.get(family.name)
    if into is None:
        into = merged[family.name] = Metric(family.name, family.documentation, family.type)
    into.samples += [Sample(each.name, {**label, **each.labels}, each.value) for each in family.samples]


def _model_metrics(router: ModelRouter) -> Iterable[Metric]:
    loaded = GaugeMetricFamily("quire_model_loaded", "Whether a model is loaded.", labels=["model"])
    waiting = GaugeMetricFamily("quire_model_waiting", "Requests that wait for a model to be loaded.", labels=["model"])
    loads = CounterMetricFamily("quire_model_loads", "Times that a model was loaded.", labels=["model"])
    unloads = CounterMetricFamily(
        "quire_model_unloads", "Times that a model was unloaded, by reason.", labels=["model", "reason"]
    )
    for slot in router.slots:
        loaded.add_metric([slot.name], float(slot.status is ModelStatus.LOADED))
        waiting.add_metric([slot.name], len(slot.waiters))
        loads.add_metric([slot.name], slot.num_loads)
        for reason, count in slot.num_unloads.items():
            unloads.add_metric([slot.name, reason.value], count)
    return loaded, waiting, loads, unloads
