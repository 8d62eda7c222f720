"""Ends that are errors to a client, as the errors they are. Knows nothing of who is told, or how."""

from quire.core.errors import DeadlineExpired, NothingLeft, NumericalError, OutOfMemory, QuireError, RequestFailed
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason

FAILURES = frozenset(FinishReason) - {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
_FORBIDDING = ("allowed_token_ids", "bad_words", "min_tokens")


def failure_of(reason: FinishReason | None, num_prompt: int, params: SamplingParams) -> QuireError | None:
    """A new error each time, since a raised one remembers where; None if it did not fail."""
    if reason is FinishReason.ERROR:
        return NumericalError()
    if reason is FinishReason.NOTHING_LEFT:
        return NothingLeft([name for name in _FORBIDDING if getattr(params, name)], formed=params.grammar is not None)
    if reason is FinishReason.FAILED:
        return RequestFailed()
    if reason is FinishReason.EXPIRED:
        return DeadlineExpired()
    if reason is FinishReason.OUT_OF_MEMORY:
        return OutOfMemory(num_prompt, params.max_tokens, params.num_sequences)
    return None
