"""Ends that are errors to a client, as the errors they are. Knows nothing of who is told, or how."""

from quire.core.errors import DeadlineExpired, NumericalError, OutOfMemory, QuireError, RequestFailed
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason

FAILURES = frozenset({FinishReason.ERROR, FinishReason.FAILED, FinishReason.EXPIRED, FinishReason.OUT_OF_MEMORY})


def failure_of(reason: FinishReason | None, num_prompt: int, params: SamplingParams) -> QuireError | None:
    """A new error each time, since a raised one remembers where; None if it did not fail."""
    if reason is FinishReason.ERROR:
        return NumericalError()
    if reason is FinishReason.FAILED:
        return RequestFailed()
    if reason is FinishReason.EXPIRED:
        return DeadlineExpired()
    if reason is FinishReason.OUT_OF_MEMORY:
        return OutOfMemory(num_prompt, params.max_tokens, params.num_sequences)
    return None
