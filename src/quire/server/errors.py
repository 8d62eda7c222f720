"""Errors as clients read them: OpenAI's body, bounded. Knows no HTTP and no engine."""

from quire.core.errors import QuireError

MAX_ERROR_CHARACTERS = 1000  # an error may quote what a client sent; it need not send all of it back

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class BodyTooLarge(QuireError):
    """More bytes than any request may have."""

    status = 413
    code = "body_too_large"

    def __init__(self, limit: int) -> None:
        super().__init__(f"The body is larger than {limit} bytes, the most that is read (--max-body).")


class Stopping(QuireError):
    """The server was told to end."""

    status = 503
    code = "server_stopping"
    retry_after_s = 5.0

    def __init__(self) -> None:
        super().__init__("The server is stopping; ask again when it is back.")


def error_body(error: QuireError, status: int | None = None) -> dict[str, object]:
    status = error.status if status is None else status
    kind = "server_error" if status >= 500 else _TYPES.get(status, "invalid_request_error")
    message = error.message[:MAX_ERROR_CHARACTERS].encode("utf-8", "replace").decode()  # half a character is no JSON
    return {"error": {"message": message, "type": kind, "param": error.param, "code": error.code}}
