"""Ollama API output: the JSON object, the JSON lines of a stream, counts and durations. Does not depend on HTTP.

Durations are in nanoseconds. The prompt's is from the first step to the first token, the output's from there to the
last one. A call is a line of its own, when its arguments are complete.
"""

import time
from datetime import UTC, datetime

import msgspec

from quire.engine.outputs import Logprob, RequestOutput
from quire.output_parsing.events import OutputEvent, PlainText, ReasoningText, ToolArguments, ToolStart
from quire.server.chat.logprobs import TokenText, chat_logprobs
from quire.server.chat.session import ChatDelta, ChatResult, ChatStream, ToolCall, parsed_arguments
from quire.server.http.errors import reply_to
from quire.server.http.sse import client_error

Body = dict[str, object]

PATH = "/api/chat"
_NS = 1_000_000_000


def timestamp(seconds: float | None = None) -> str:
    """A time as Ollama writes it: RFC 3339, in UTC. None: now."""
    moment = datetime.now(UTC) if seconds is None else datetime.fromtimestamp(seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class OllamaResponse:
    """The JSON of one chat or generation. `num_top`: the alternatives of each token; None: no log-probabilities."""

    def __init__(
        self,
        model: str,
        chat: ChatStream,
        token_text: TokenText,
        began_s: float,
        *,
        is_chat: bool,
        num_top: int | None,
    ) -> None:
        self._model = model
        self._chat = chat
        self._token_text = token_text
        self._began_s = began_s
        self._is_chat = is_chat
        self._num_top = num_top
        self._logprobs: list[dict[int, Logprob]] = []  # that no line holds yet
        self._open_call: int | None = None  # whose arguments are not complete
        self._reason: str | None = None

    @staticmethod
    def loaded(model: str, *, is_chat: bool, reason: str = "load") -> Body:
        """The response to a request that only loads the model, or unloads it."""
        content: Body = {"message": {"role": "assistant", "content": ""}} if is_chat else {"response": ""}
        return {"model": model, "created_at": timestamp(), **content, "done": True, "done_reason": reason}

    def whole(self, result: ChatResult) -> Body:
        [output], [choice] = result.output.outputs, result.choices
        self._reason = output.finish_reason
        self._logprobs = output.logprobs or []
        calls = [_call(place, call) for place, call in sorted(choice.calls.items())]
        return self._line(choice.text, choice.reasoning, calls) | self._end(result.output)

    def lines(self, chat_delta: ChatDelta) -> bytes:
        """The lines of one delta."""
        delta, events = chat_delta
        self._logprobs += delta.logprobs
        lines = [line for event in events for line in self._event_lines(event)]
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            lines += self._close_call()
        return b"".join(msgspec.json.encode(line) + b"\n" for line in lines)

    def last_line(self, output: RequestOutput) -> bytes:
        return msgspec.json.encode(self._line("") | self._end(output)) + b"\n"

    def failed(self, error: Exception) -> bytes:
        return reply_to(client_error(error), path=PATH).body + b"\n"

    def _event_lines(self, event: OutputEvent) -> list[Body]:
        match event:
            case PlainText(text):
                return [*self._close_call(), self._line(text)]
            case ReasoningText(text):
                return [*self._close_call(), self._line("", text)]
            case ToolStart(place, _):
                closed = self._close_call()
                self._open_call = place
                return closed
            case ToolArguments():
                return []

    def _close_call(self) -> list[Body]:
        if self._open_call is None:
            return []
        place, self._open_call = self._open_call, None
        return [self._line("", calls=[_call(place, self._chat.choices[0].calls[place])])]

    def _line(self, text: str, reasoning: str = "", calls: list[Body] | None = None) -> Body:
        """An object with this output, and the log-probabilities of all tokens since the last one."""
        line: Body = {"model": self._model, "created_at": timestamp()}
        thinking: Body = {"thinking": reasoning} if reasoning else {}
        tool_calls: Body = {"tool_calls": calls} if calls else {}
        if self._is_chat:
            line["message"] = {"role": "assistant", "content": text, **thinking, **tool_calls}
        else:
            line |= {"response": text, **thinking}
        line["done"] = False
        if self._num_top is not None and self._logprobs:
            line["logprobs"] = chat_logprobs(self._logprobs, self._num_top, self._token_text)
            self._logprobs = []
        return line

    def _end(self, output: RequestOutput) -> Body:
        times = output.metrics
        first_s = times.first_token_s or times.arrival_s
        last_s = times.finished_s or first_s
        started_s = times.arrival_s if times.seated_s is None else times.seated_s
        return {
            "done": True,
            "done_reason": "length" if self._reason == "length" else "stop",
            "total_duration": _nanoseconds(time.monotonic() - self._began_s),
            "load_duration": 0,  # the model is loaded
            "prompt_eval_count": len(output.prompt_token_ids),
            "prompt_eval_duration": _nanoseconds(first_s - started_s),
            "eval_count": len(output.outputs[0].token_ids),
            "eval_duration": _nanoseconds(last_s - first_s),
        }


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * _NS))


def _call(place: int, call: ToolCall) -> Body:
    function = {"index": place, "name": call.name, "arguments": parsed_arguments(call.arguments)}
    return {"id": call.id, "function": function}
