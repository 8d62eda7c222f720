"""An engine may be detached at any moment, also while the thread that reads from it handles what it said."""

import time
from typing import cast

import pytest

from quire.engine.child import Child
from quire.engine.front import Heard, Stop
from quire.engine.messages import Progress
from quire.engine.ticket import Ticket
from quire.engine.wire import AbortFrame, Message, StopFrame
from quire.server.service import Service


class Sent:
    """Of an engine process, the messages that were sent to it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


class Detached(Service):
    """The first look finds an engine; from the second on there is none, as if another thread had detached it."""

    sent: Sent | None = None

    @property
    def _child(self) -> Child | None:
        found, self.sent = self.sent, None
        return cast("Child | None", found)

    @_child.setter
    def _child(self, child: Child | None) -> None:
        assert child is None


def test_a_stop_for_an_engine_that_is_detached_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    service, sent = Detached(None, time.monotonic), Sent()
    monkeypatch.setattr(service._front, "hear", lambda progress: Heard([], [Stop(3, 0), Stop(4, 1)], []))
    service.sent = sent
    service._advance(cast(Progress, None))
    assert sent.messages == [StopFrame(3, 0)], "the second goes nowhere"


def test_an_abort_for_an_engine_that_is_detached_meanwhile() -> None:
    service, sent = Detached(None, time.monotonic), Sent()
    service.sent = sent
    ticket = Ticket.__new__(Ticket)
    ticket.number = 5
    service._abort(ticket)
    service._abort(ticket)
    assert sent.messages == [AbortFrame(5)]
