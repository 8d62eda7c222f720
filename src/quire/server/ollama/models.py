"""Ollama API: the served model in /api/tags, /api/ps and /api/show, its embeddings, and /api/version.

Clients do not manage models: what pulls, creates or deletes one is refused."""

import hashlib
import time

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from quire.core.errors import QuireError, shown
from quire.engine.stats import EngineInfo
from quire.server.context import ListedModel, ModelSummary, ServedModel, ServerState
from quire.server.http.errors import rename_error_params
from quire.server.http.request_context import route_path
from quire.server.http.sse import json_response, until_disconnect
from quire.server.ollama.generate import LATEST, OllamaOptions, check_name
from quire.server.ollama.response import timestamp
from quire.server.prompt_group import embed as embed_inputs
from quire.server.prompt_group import input_ids
from quire.server.request.decode import read
from quire.server.request.schema import Dimensions, EmbeddingBody
from quire.version import __version__

Body = dict[str, object]

_API_VERSION = "0.12.11"  # of Ollama, whose API this is: clients compare it
_NEVER = "9999-12-31T23:59:59Z"  # the model stays loaded


class ModelRefused(QuireError):
    """A request to add or remove a model."""

    status = 403
    code = "not_served"


class OllamaModelBody(Struct, kw_only=True):
    """A model by name. Older clients call the field `name`."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class OllamaEmbeddingBody(Struct, kw_only=True):
    """The body of POST /api/embed: one text or many."""

    input: str | list[str]
    model: str | None = None
    truncate: bool | None = None  # unset means true: what exceeds the context is dropped from the end
    dimensions: Dimensions | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


class OllamaPromptBody(Struct, kw_only=True):
    """The body of POST /api/embeddings, the older form: one text."""

    prompt: str | None = None
    model: str | None = None
    options: OllamaOptions | None = None
    keep_alive: float | str | None = None


async def tags(state: ServerState, request: Request) -> Response:
    return json_response({"models": [_card(each.model, name) for each in state.models for name in each.model.names]})


async def ps(state: ServerState, request: Request) -> Response:
    """The loaded models, with the memory of their weights and KV caches."""
    return json_response({"models": [_loaded(each.model, each.info, each) for each in state.models if each.info]})


def _loaded(model: ServedModel, info: EngineInfo, listed: ListedModel) -> Body:
    used = (info.memory.weights + info.memory.kv) * info.num_ranks
    in_gpu = 0 if info.device.lower().startswith("cpu") else used
    expires = _NEVER if listed.unload_in_s is None else timestamp(time.time() + listed.unload_in_s)
    loaded: Body = {"size": used, "size_vram": in_gpu, "expires_at": expires, "context_length": model.max_model_len}
    return _card(model, model.name) | loaded


async def show(state: ServerState, request: Request) -> Response:
    body = await read(request, OllamaModelBody)
    name = body.model or body.name
    model = (state.models[0] if name is None else find_tagged(state, name)).model
    capabilities = ["completion"]
    if model.model_format.detected.tools is not None:
        capabilities.append("tools")
    if model.model_format.detected.reasoning is not None:
        capabilities.append("thinking")
    return json_response(
        {
            "modelfile": f"# A model served by quire {__version__}\nFROM {model.name}\n",
            "parameters": _parameters(model),
            "template": model.chat_template or "",
            "details": _details(model.summary),
            "model_info": _model_info(model),
            "capabilities": capabilities,
            "modified_at": timestamp(model.created),
        }
    )


def find_tagged(state: ServerState, name: str) -> ListedModel:
    """A model by its name, with or without the tag `latest`."""
    tagged = any(name in listed.model.names for listed in state.models)
    return state.find_model(name if tagged else name.removesuffix(LATEST))


async def version(state: ServerState, request: Request) -> Response:
    return json_response({"version": _API_VERSION, "quire": __version__})


async def pull(state: ServerState, request: Request) -> Response:
    """A served model is there; others are not fetched on the word of a client."""
    body = await read(request, OllamaModelBody)
    name = body.model or body.name
    names = [each for listed in state.models for each in listed.model.names]
    if name not in names and str(name).removesuffix(LATEST) not in names:
        here = ", ".join(map(repr, names))
        raise ModelRefused(
            f"Models are not pulled over HTTP, and {shown(name)} is not served here; this server has {here}. On its "
            f"machine: quire pull NAME, quire serve NAME.",
            param="model",
        )
    return json_response({"status": "success"})


async def refuse(state: ServerState, request: Request) -> Response:
    """Models are not created, copied, pushed or deleted over HTTP."""
    raise ModelRefused(
        f"{route_path(request.scope):.100} is not served here: models are managed on the server's own machine, with "
        f"the commands quire pull, quire rm and quire serve."
    )


async def embed(state: ServerState, request: Request) -> Response:
    began_s = time.monotonic()
    body = await read(request, OllamaEmbeddingBody)
    name = check_name(state.model, body.model)
    vectors: list[list[float]] = []
    num_tokens = 0
    if body.input != []:
        truncate = None if body.truncate is False else -1
        common = EmbeddingBody(
            input=list(body.input) if isinstance(body.input, list) else body.input,
            dimensions=body.dimensions,
            truncate_prompt_tokens=truncate,
            truncation_side="right",
        )
        vectors, num_tokens = await _vectors(state, request, common)
    return json_response(
        {
            "model": name,
            "embeddings": vectors,
            "total_duration": round((time.monotonic() - began_s) * 1_000_000_000),
            "load_duration": 0,
            "prompt_eval_count": num_tokens,
        }
    )


async def embeddings(state: ServerState, request: Request) -> Response:
    body = await read(request, OllamaPromptBody)
    check_name(state.model, body.model)
    if not body.prompt:
        return json_response({"embedding": []})  # the request of clients that load a model
    with rename_error_params({"input": "prompt"}):
        common = EmbeddingBody(input=body.prompt, truncate_prompt_tokens=-1, truncation_side="right")
        [vector], _ = await _vectors(state, request, common)
    return json_response({"embedding": vector})


async def _vectors(state: ServerState, request: Request, body: EmbeddingBody) -> tuple[list[list[float]], int]:
    """The embeddings of a body, and the number of tokens in it."""
    inputs = await state.model.text_threads.run(input_ids, body, state.model)
    vectors = await until_disconnect(request, embed_inputs(state.engine, inputs, body))
    return [vector.tolist() for vector in vectors], sum(map(len, inputs))


def _card(model: ServedModel, name: str) -> Body:
    tagged = name if ":" in name else name + LATEST
    num_bytes = 0 if model.summary is None else model.summary.num_bytes
    digest = hashlib.sha256(f"{name} {num_bytes}".encode()).hexdigest()  # of the name and size: clients show it
    return {
        "name": tagged,
        "model": tagged,
        "modified_at": timestamp(model.created),
        "size": num_bytes,
        "digest": digest,
        "details": _details(model.summary),
    }


def _details(summary: ModelSummary | None) -> Body:
    if summary is None:
        return {}
    family = summary.spec.family
    return {
        "parent_model": "",
        "format": summary.file_format,
        "family": family,
        "families": [family],
        "parameter_size": _parameter_size(summary.num_parameters),
        "quantization_level": summary.encoding,
    }


def _parameter_size(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.1f}M"


def _parameters(model: ServedModel) -> str:
    """The sampling defaults of the model, a line each."""
    names = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
             "repetition_penalty": "repeat_penalty"}  # fmt: skip
    return "\n".join(f"{shown_as:<30} {getattr(model.defaults, name)}" for name, shown_as in names.items())


def _model_info(model: ServedModel) -> Body:
    summary = model.summary
    if summary is None:
        return {}
    spec = summary.spec
    return {
        "general.architecture": spec.family,
        "general.parameter_count": summary.num_parameters,
        f"{spec.family}.context_length": model.max_model_len,
        f"{spec.family}.embedding_length": spec.hidden_size,
        f"{spec.family}.block_count": spec.num_layers,
        f"{spec.family}.feed_forward_length": spec.ffn_size,
        f"{spec.family}.attention.head_count": spec.num_heads,
        f"{spec.family}.attention.head_count_kv": spec.num_kv_heads,
        f"{spec.family}.vocab_size": spec.vocab_size,
    }
