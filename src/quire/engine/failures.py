"""Ends that are errors to a client, as the errors they are. Knows nothing of who is told, or how."""

from quire.core.errors import DeadlineExpired, NumericalError, OutOfMemory, QuireError
from quire.core.request import Request
from quire.core.step import FinishReason

FAILURES = frozenset({FinishReason.ERROR, FinishReason.EXPIRED, FinishReason.OUT_OF_MEMORY})


def failure_of(reason: FinishReason | None, request: Request) -> QuireError | None:
    """A new error each time, since a raised one remembers where; None if it did not fail."""
    if reason is FinishReason.ERROR:
        return NumericalError()
    if reason is FinishReason.EXPIRED:
        return DeadlineExpired()
    if reason is FinishReason.OUT_OF_MEMORY:
        return OutOfMemory(len(request.prompt), request.max_tokens, request.num_sequences)
    return None
