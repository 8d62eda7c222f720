"""One request as the gate sees it: its ids, its holder, what came of it, and how many tokens that took."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import NamedTuple

from starlette.types import Scope

from quire.server.keys import NOBODY, Identity

_STATE_KEY = "quire.visit"

CURRENT: ContextVar["Visit | None"] = ContextVar("visit", default=None)  # whose request a task works on


@dataclass(slots=True)
class Visit:
    """Lives as long as the request. The client's own label is only ever repeated to it, never looked up."""

    request_id: str
    began_s: float  # when its head was here
    label: str | None = None
    passed: bool = False  # the door has nothing against it
    identity: Identity = NOBODY
    num_prompt_tokens: int | None = None  # None as long as the engine was not asked
    num_completion_tokens: int | None = None
    priority: int | None = None  # what its headers say
    timeout_s: float | None = None
    status: int | None = None  # once the response has begun
    complete: bool = False
    cut_off: bool = False  # its connection has answered in the place of the application
    failed: bool = False  # ended by a mistake of ours, however it began
    error_code: str | None = None  # of the error that was its answer

    def note_prompt(self, num_tokens: int) -> None:
        """The engine is asked to go on with so many; with those of other prompts, if it came with several."""
        self.num_prompt_tokens = (self.num_prompt_tokens or 0) + num_tokens

    def note_completion(self, num_tokens: int) -> None:
        self.num_completion_tokens = (self.num_completion_tokens or 0) + num_tokens


class Answered(NamedTuple):
    """A request is over. Route, method and status come from closed sets, so that a metric may be labelled by them."""

    route: str
    method: str
    status: int
    duration_s: float
    identity_name: str
    request_id: str
    label: str | None = None
    num_prompt_tokens: int | None = None
    num_completion_tokens: int | None = None
    error_code: str | None = None

    @property
    def refused_early(self) -> bool:
        """Whether an error answered it before the engine was asked."""
        return self.error_code is not None and self.num_prompt_tokens is None


def begin_visit(scope: Scope, visit: Visit) -> None:
    scope.setdefault("state", {})[_STATE_KEY] = visit


def has_visit(scope: Scope) -> bool:
    return _STATE_KEY in scope.get("state", ())


def visit_of(scope: Scope) -> Visit:
    visit = scope["state"][_STATE_KEY]
    assert isinstance(visit, Visit)
    return visit
