"""A front and an engine in one process: what `LLM` speaks to."""

from threading import RLock

from quire.core.sampling import SamplingParams
from quire.engine.engine import Engine
from quire.engine.front import Front, Prompt
from quire.engine.outputs import Delta
from quire.engine.terms import USUAL, Terms
from quire.engine.ticket import Ticket
from quire.text.tokenizer import Tokenizer


class LocalFront:
    """Submit, turn, and read what each turn brought. Threads take turns at it; whoever must do several things at once
    holds the lock meanwhile."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None) -> None:
        self.lock = RLock()
        self._engine = engine
        self._front = Front(tokenizer, engine.clock)

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        terms: Terms = USUAL,
        streaming: bool = False,
        pooled: bool = False,
    ) -> Ticket:
        """Queue a prompt, pooled if it is to become an embedding. A `QuireError` means that nothing happened."""
        with self.lock:
            order, ticket = self._front.open(prompt, params, terms=terms, streaming=streaming, pooled=pooled)
            try:
                accepted = self._engine.submit(order)
            except BaseException:
                self._front.drop(ticket)
                raise
            self._front.accept(accepted)
            return ticket

    def abort(self, ticket: Ticket) -> None:
        """Give up a request; what it has so far stays readable."""
        with self.lock:
            self._engine.abort(ticket.number)
            self._front.drop(ticket)

    def turn(self) -> list[Delta]:
        """One turn of the engine; what each who listens gained by it, and each who finished."""
        with self.lock:
            progress = self._engine.turn()
            if progress is None:
                return []
            heard = self._front.hear(progress)
            for number, index in heard.stops:
                self._engine.stop(number, index)
            return heard.deltas

    def encode(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """A prompt's text, if it came as text, and its ids."""
        return self._front.encode(prompt)

    @property
    def idle(self) -> bool:
        return self._engine.idle

    def now(self) -> float:
        """The clock that metrics are read on, in seconds."""
        return self._front.now()
