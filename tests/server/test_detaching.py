"""An engine may be detached at any moment, also while the reading thread handles a message from it."""

import time
from typing import cast

import numpy as np
import pytest

from quire.core.sampling import SamplingParams
from quire.core.step_output import StepOutput
from quire.engine.engine_process import EngineProcess
from quire.engine.messages import AbortRequest, AddRequest, StopSequence
from quire.engine.output_processor import ProcessedOutput
from quire.engine.request_state import RequestState
from quire.engine.wire import Message
from quire.server.async_engine import AsyncEngine


class Sent:
    """A fake engine process that keeps the messages sent to it."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)


class Detached(AsyncEngine):
    """The first read finds an engine, the second none, as if another thread had detached it."""

    sent: Sent | None = None

    @property
    def _process(self) -> EngineProcess | None:
        found, self.sent = self.sent, None
        return cast("EngineProcess | None", found)

    @_process.setter
    def _process(self, child: EngineProcess | None) -> None:
        assert child is None


def test_a_stop_while_the_engine_is_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent = Detached(None, time.monotonic), Sent()
    monkeypatch.setattr(
        engine._processor, "process", lambda progress: ProcessedOutput([], [StopSequence(3, 0), StopSequence(4, 1)], [])
    )
    engine.sent = sent
    engine._process_output(StepOutput(0, np.array([], np.int64), np.array([], np.int32)))
    assert sent.messages == [StopSequence(3, 0)], "the second goes nowhere"


def test_an_abort_while_the_engine_is_detached() -> None:
    engine, sent = Detached(None, time.monotonic), Sent()
    engine.sent = sent
    ticket = RequestState.__new__(RequestState)
    ticket.request = AddRequest(5, [1], SamplingParams())
    engine._abort(ticket)
    engine._abort(ticket)
    assert sent.messages == [AbortRequest(5)]
