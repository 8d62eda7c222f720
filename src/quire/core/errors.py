"""Every error a user can cause, with its HTTP status, its error code and the exit status of the command line.

Internal errors are assertions, never these.
"""

from collections.abc import Sequence

_SHOWN = 80  # characters of a wrong value that an error repeats


def shown(value: object) -> str:
    """A wrong value for an error message, shortened."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # Python limits the digits of an int and the depth of a nesting
        return f"a value of type {type(value).__name__} too large to show"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"


class QuireError(Exception):
    """A request or command that cannot be carried out; the message has the reason, the numbers and what to do."""

    status: int = 400
    code: str = "invalid_request"
    exit_code: int = 2
    retry_after_s: float | None = None  # when a retry may succeed; a 5xx without it would fail again

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidParameter(QuireError):
    """A sampling or request parameter outside its range."""

    code = "invalid_parameter"


class InvalidPrompt(QuireError):
    """A prompt that is empty, or holds token ids the model does not have."""

    code = "invalid_prompt"


class InvalidGrammar(QuireError):
    """A schema, regular expression, list of choices or grammar that cannot be compiled."""

    code = "invalid_grammar"


class UnsupportedSchema(InvalidGrammar):
    """A JSON schema with a keyword that would not be enforced; the message names the keyword and its place."""

    code = "unsupported_schema"


class GrammarFailed(InvalidGrammar):
    """A grammar that exceeded a limit while an output followed it: the finish reason is "grammar_failed"."""

    def __init__(self) -> None:
        super().__init__(
            "The grammar became too large or too slow while this output followed it. Use fewer alternatives, and fewer "
            "optional and repeated parts beside one another."
        )


class ContextLengthExceeded(QuireError):
    """Prompt plus completion is longer than the model's context. `at_least`: the text was not tokenized to its end."""

    code = "context_length_exceeded"

    def __init__(
        self, limit: int, num_prompt: int, num_completion: int, *, param: str = "messages", at_least: bool = False
    ) -> None:
        least = "at least " if at_least else ""
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested {least}"
            f"{num_prompt + num_completion} tokens ({least}{num_prompt} in the messages, {num_completion} in the "
            f"completion). Please reduce the length of the messages or completion.",
            param=param,
        )


class NeverFits(QuireError):
    """A request that would not fit even an empty KV cache."""

    code = "never_fits"

    def __init__(
        self, num_tokens: int, num_blocks: int, pool_blocks: int, block_size: int, num_sequences: int = 1
    ) -> None:
        whole = (
            f"{num_tokens} tokens" if num_sequences == 1 else f"{num_sequences} continuations of {num_tokens} tokens"
        )
        fewer = "" if num_sequences == 1 else "ask for fewer continuations, "
        super().__init__(
            f"This request needs {num_blocks} KV blocks ({whole}, {block_size} a block), but the "
            f"whole cache holds {pool_blocks} ({pool_blocks * block_size} tokens). Shorten the prompt or "
            f"max_tokens, {fewer}or give the engine a larger KV cache (--kv-cache-memory).",
            param="max_tokens",
        )


class ConfigError(QuireError):
    """Settings that contradict each other or this machine."""

    code = "invalid_config"


class ModelNotFound(QuireError):
    """No such model under that name, path or hub id."""

    status = 404
    code = "model_not_found"


class FetchFailed(QuireError):
    """A model could not be downloaded: no network, no permission, no disk space."""

    status = 503
    code = "fetch_failed"
    exit_code = 1


class UnsupportedModel(QuireError):
    """A model, checkpoint or tokenizer that quire does not read; named, with the nearest that it does."""

    code = "unsupported_model"


class BrokenModelFile(QuireError):
    """A model file that is damaged, truncated or inconsistent."""

    code = "broken_model_file"


class BrokenJournal(QuireError):
    """A file that is not a scheduler's journal, or one whose header cannot be read."""

    code = "broken_journal"


class ChatTemplateError(QuireError):
    """The model has no chat template, or its template refused these messages."""

    code = "chat_template_error"


class NoTokenizer(QuireError):
    """Text input or output for a model that has no tokenizer."""

    code = "no_tokenizer"

    def __init__(self, instead: str) -> None:
        super().__init__(
            f"This model has no tokenizer (a folder needs tokenizer.json, dummy weights have none); {instead}."
        )


class NumericalError(QuireError):
    """A sequence without a token to sample: it ended with the finish reason "error"."""

    status = 500
    code = "numerical_error"
    exit_code = 1

    def __init__(self) -> None:
        super().__init__(
            "No token could be sampled: the model's logits were not finite, or the grammar of the answer could not "
            "be matched any further (see the log)."
        )


class NothingLeft(QuireError):
    """A sequence whose own constraints left no token: it ended with the finish reason "nothing_left"."""

    code = "nothing_left"

    def __init__(self, names: Sequence[str], *, formed: bool) -> None:
        forbidding = [*(["the form of the answer"] if formed else []), *names]
        super().__init__(
            f"No token could be sampled: {' and '.join(forbidding)} left none. Relax one of them.",
            param=names[-1] if names else None,
        )


class RequestFailed(QuireError):
    """A request that failed its step: its finish reason is "failed"."""

    status = 500
    code = "request_failed"
    exit_code = 1

    def __init__(self) -> None:
        super().__init__("The engine failed on this request only; see the log. It was not retried.")


class OutOfMemory(QuireError):
    """The largest request of a step that ran out of memory: its finish reason is "out_of_memory"."""

    status = 503
    code = "out_of_memory"
    exit_code = 1

    def __init__(self, num_prompt: int, max_tokens: int | None, num_sequences: int) -> None:
        longest = "as many more as fit" if max_tokens is None else f"up to {max_tokens} more"
        super().__init__(
            f"Out of memory for a step: the largest request was ended so that the others could continue. This request "
            f"has {num_prompt} prompt tokens and {longest} in {num_sequences} sequence(s). "
            f"Ask for less at once, or start the engine with a smaller max_num_batched_tokens."
        )


class DeadlineExpired(QuireError):
    """A request was not admitted before its timeout: it ended with the finish reason "expired"."""

    status = 504
    code = "deadline_expired"
    exit_code = 1

    def __init__(self) -> None:
        super().__init__(
            "The request waited longer than its timeout_s and was not started; increase timeout_s or try again."
        )


class DuplicateRequest(QuireError):
    """A request with the id of an unfinished one."""

    status = 409
    code = "duplicate_request"

    def __init__(self, request_id: int) -> None:
        super().__init__(f"Request {request_id} already exists; request ids must be unique.")


class QueueFull(QuireError):
    """Admission control: the queue has reached its configured limit."""

    status = 429
    code = "queue_full"
    retry_after_s = 1.0

    def __init__(self, num_waiting: int, limit: int, unit: str) -> None:
        super().__init__(f"The queue is full: {num_waiting} {unit} are waiting, the limit is {limit}. Try again later.")


class Draining(QuireError):
    """The engine finishes its requests and accepts no new ones."""

    status = 503
    code = "draining"
    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__("This engine is shutting down and accepts no more requests; try another one.")


class EngineFailed(QuireError):
    """The engine itself failed; no request is to blame."""

    status = 500
    code = "engine_failed"
    exit_code = 1


class RankFailed(EngineFailed):
    """A process of a model that is divided among several failed: no later step can be computed."""
