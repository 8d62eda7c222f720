"""Writes OpenAI-shaped bodies: whole answers, chunks of a stream, usage, errors. Knows no HTTP and no engine."""

import json
import time
import uuid
from dataclasses import dataclass, field

from quire.core.errors import QuireError
from quire.engine.outputs import CompletionOutput, Delta, RequestOutput

Body = dict[str, object]

MAX_ERROR_CHARACTERS = 1000  # an error may quote what a client sent; it need not send all of it back
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Answer:
    """The bodies of one answer: they share an id, a time and a model. A chat speaks in messages, the rest in text."""

    model: str
    chat: bool
    key: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, output: RequestOutput) -> Body:
        choices = [self._choice(each) for each in output.outputs]
        head = self._head("chat.completion" if self.chat else "text_completion")
        return {**head, "choices": choices, "usage": usage(output)}

    def opening(self, num_choices: int) -> list[bytes]:
        """What comes before any text: in a chat, who speaks."""
        role: Body = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk(index, role, None) for index in range(num_choices)] if self.chat else []

    def chunks(self, delta: Delta) -> list[bytes]:
        """A chat gives the reason in a chunk of its own, a completion with its last text."""
        if not self.chat:
            spoken = delta.text or delta.finish_reason
            return [self._chunk(delta.index, {"text": delta.text}, delta.finish_reason)] if spoken else []
        chunks = [self._chunk(delta.index, {"delta": {"content": delta.text}}, None)] if delta.text else []
        if delta.finish_reason is not None:
            chunks.append(self._chunk(delta.index, {"delta": {}}, delta.finish_reason))
        return chunks

    def usage_chunk(self, output: RequestOutput) -> bytes:
        return event({**self._chunk_head(), "choices": [], "usage": usage(output)})

    def _choice(self, output: CompletionOutput) -> Body:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        said: Body = {"message": message} if self.chat else {"text": output.text}
        return {"index": output.index, **said, "finish_reason": output.finish_reason, "logprobs": None}

    def _chunk(self, index: int, said: Body, finish_reason: str | None) -> bytes:
        choice = {"index": index, **said, "finish_reason": finish_reason, "logprobs": None}
        return event({**self._chunk_head(), "choices": [choice]})

    def _chunk_head(self) -> Body:
        return self._head("chat.completion.chunk" if self.chat else "text_completion")

    def _head(self, name: str) -> Body:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {"id": f"{prefix}-{self.key}", "object": name, "created": self.created, "model": self.model}


def usage(output: RequestOutput) -> Body:
    prompt = len(output.prompt_token_ids)
    completion = sum(len(each.token_ids) for each in output.outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": output.metrics.num_cached_tokens},
    }


def error_body(error: QuireError) -> Body:
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    message = error.message[:MAX_ERROR_CHARACTERS]
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}


def event(body: Body) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"
