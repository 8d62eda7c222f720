"""What every endpoint needs: the facts of what is served, the engine behind it, and those who watch over both."""

from dataclasses import dataclass

from quire.server.metrics import Metrics
from quire.server.served import Served
from quire.server.service import EngineRestarting, Service
from quire.server.sse import KEEP_ALIVE_S
from quire.server.supervisor import Health, Supervisor
from quire.server.turnstile import Turnstile


@dataclass(slots=True)
class Desk:
    """Endpoints are functions of a desk and a request."""

    service: Service
    supervisor: Supervisor
    turnstile: Turnstile
    metrics: Metrics
    keep_alive_s: float = KEEP_ALIVE_S
    known: Served | None = None  # once the engine has said what it can do

    @property
    def served(self) -> Served:
        if self.known is None:
            raise EngineRestarting("The model is being loaded; ask again in a moment.")
        return self.known

    @property
    def health(self) -> Health:
        """As the supervisor has it; but an engine that has just come serves nobody before its facts are known here."""
        health = self.supervisor.health
        return Health.STARTING if health is Health.READY and self.known is None else health
