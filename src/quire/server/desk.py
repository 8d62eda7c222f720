"""What every endpoint needs: the facts of what is served, the engine behind it, and how long silence may last."""

from dataclasses import dataclass

from quire.server.served import Served
from quire.server.service import Service
from quire.server.sse import KEEP_ALIVE_S


@dataclass(frozen=True, slots=True)
class Desk:
    """Endpoints are functions of a desk and a request."""

    served: Served
    service: Service
    keep_alive_s: float = KEEP_ALIVE_S
