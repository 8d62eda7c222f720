"""The prefill/decode split on this machine: real servers with the same number of engine processes, in turns.

In each round every setup is a new `quire serve` that gets the same requests at the same times: replicas, or prefill and
decode engines. Engines on the same cores take these from each other; what is compared is the sum of all effects.
"""

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

from quire.bench.load_client import LoadSettings, endpoint, send_load
from quire.bench.service_levels import ServedRequest
from quire.bench.serving import running_server
from quire.core.errors import ConfigError
from quire.workload.traces import TraceRow


class ServerSetup(NamedTuple):
    """Engine processes by role. Without prefill engines, each of the others does everything."""

    num_prefill: int
    num_decode: int

    @property
    def name(self) -> str:
        if not self.num_prefill:
            return f"{self.num_decode} replicas"
        return f"{self.num_prefill} prefill + {self.num_decode} decode"

    @property
    def arguments(self) -> list[str]:
        return ["--replicas", str(self.num_decode), "--prefill-engines", str(self.num_prefill)]


def setups_of(num_engines: int) -> list[ServerSetup]:
    """Replicas, and every ratio of prefill to decode engines."""
    if num_engines < 2:
        raise ConfigError(f"A split needs two engines or more, not {num_engines}; give --engines 2.", param="engines")
    return [ServerSetup(number, num_engines - number) for number in range(num_engines)]


@dataclass(frozen=True, slots=True)
class SplitServing:
    """The servers, and the requests of each round."""

    model: str | None
    threads: int  # of each engine
    rows: tuple[TraceRow, ...]
    settings: LoadSettings
    options: tuple[str, ...] = ()  # further ones of `quire serve`

    def serve(self, setup: ServerSetup) -> list[ServedRequest]:
        """One round of one setup."""
        model = [] if self.model is None else [self.model]
        arguments = [*model, "--device", "cpu", "--threads", str(self.threads), *self.options, *setup.arguments]
        with running_server(arguments) as server:
            target = endpoint(f"http://{server.host}:{server.port}", None, None)
            return send_load(self.rows, target, self.settings)


class SetupRounds(NamedTuple):
    """What the clients of one setup saw, round by round."""

    setup: ServerSetup
    rounds: list[list[ServedRequest]]


def measure_split(
    serving: SplitServing, setups: Many[ServerSetup], num_rounds: int, say: Callable[[str], None]
) -> list[SetupRounds]:
    """All setups in each round; every other round in the opposite order."""
    measured = [SetupRounds(setup, []) for setup in setups]
    for number in range(num_rounds):
        for each in measured if number % 2 == 0 else reversed(measured):
            say(f"round {number + 1} of {num_rounds}: {each.setup.name}")
            each.rounds.append(serving.serve(each.setup))
    return measured
