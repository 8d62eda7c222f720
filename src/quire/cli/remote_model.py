"""A model of an OpenAI-compatible server, for `quire chat --url` and `quire run --url`. Imports no torch."""

import json
from collections.abc import Callable, Mapping, Sequence

from quire.cli.printed_reply import Conversation, ReplyEnd, StopRequest
from quire.cli.server_client import ServerClient, error_text
from quire.core.errors import ConfigError, EngineFailed, QuireError

_DONE = "[DONE]"
_KEY_HINT = "--api-key or QUIRE_API_KEY"


class RemoteModel:
    """A model by its name on a server. Without a name, the first that the server lists."""

    def __init__(self, url: str, key: str | None, name: str | None) -> None:
        self._server = ServerClient(url.rstrip("/").removesuffix("/v1"), key, key_hint=_KEY_HINT)
        names = self.names()
        self.name = names[0] if name is None else name
        if name is not None:
            self.choose(name)

    def names(self) -> Sequence[str]:
        page = self._server.get("/v1/models")
        try:
            names = [str(model["id"]) for model in json.loads(page)["data"]]
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{self._server.url}/v1/models is not that of an OpenAI-compatible server.") from None
        if not names:
            raise ConfigError(f"{self._server.url} serves no model.")
        return names

    def choose(self, name: str) -> None:
        names = self.names()
        if name not in names:
            raise ConfigError(f"{self._server.url} serves no {name!r}; it serves {', '.join(names)}.", param="model")
        self.name = name

    def reply(
        self,
        prompt: str | Conversation,
        settings: Mapping[str, object],
        show: Callable[[str, bool], None],
        stop: StopRequest,
    ) -> ReplyEnd:
        body: dict[str, object] = {
            **{name: value for name, value in settings.items() if value is not None},
            "model": self.name,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if isinstance(prompt, str):
            path, body["prompt"] = "/v1/completions", prompt
        else:
            path, body["messages"] = "/v1/chat/completions", list(prompt)

        def interruptible(interrupt: Callable[[], None]) -> None:
            stop.interrupt = interrupt

        reading = _ReplyReader(show)
        try:
            for event in self._server.stream(path, body, interruptible):
                if stop.requested or event == _DONE:
                    break
                reading.read(event)
        except QuireError:
            if not stop.requested:
                raise
        finally:
            stop.interrupt = None
        return reading.end(aborted=stop.requested)


class _ReplyReader:
    """Reads the events of a stream."""

    def __init__(self, show: Callable[[str, bool], None]) -> None:
        self._show = show
        self._finish_reason: str | None = None
        self._num_pieces = 0
        self._num_tokens: int | None = None

    def read(self, event: str) -> None:
        try:
            chunk = json.loads(event)
            if "error" in chunk:
                raise EngineFailed(f"The server ended the reply: {error_text(event) or 'it gives no reason.'}")
            usage, choices = chunk.get("usage"), chunk.get("choices")
            if usage and isinstance(usage.get("completion_tokens"), int):
                self._num_tokens = usage["completion_tokens"]
            if choices:
                self._read_choice(choices[0])
        except (ValueError, TypeError, AttributeError, KeyError):
            raise EngineFailed("The server sends a stream that is not OpenAI's.") from None

    def _read_choice(self, choice: Mapping[str, object]) -> None:
        delta = choice.get("delta")
        if isinstance(delta, dict):
            pieces = [(delta.get("reasoning_content") or delta.get("reasoning"), True), (delta.get("content"), False)]
        else:
            pieces = [(choice.get("text"), False)]
        for text, is_reasoning in pieces:
            if isinstance(text, str) and text:
                self._num_pieces += 1
                self._show(text, is_reasoning)
        reason = choice.get("finish_reason")
        self._finish_reason = reason if isinstance(reason, str) else self._finish_reason

    def end(self, *, aborted: bool) -> ReplyEnd:
        num_tokens = self._num_pieces if self._num_tokens is None else self._num_tokens
        if aborted:
            return ReplyEnd("abort", num_tokens)
        failure = None
        if self._finish_reason is None:
            failure = EngineFailed("The connection ended before the reply did.")
        return ReplyEnd(self._finish_reason, num_tokens, failure)
