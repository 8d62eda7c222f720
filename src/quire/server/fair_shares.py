"""Fair shares of one bounded resource (places of open requests, prompt tokens that wait), by client and weight.

What is taken cannot be taken back, so a client that is alone may fill the limit; a reserve above the limit is for
clients below their share. The law, for a limit of N, a reserve of R, and a client that holds h, with weight w:

- Its share is N * w / W, where W is the weight of all clients that hold something, and of this one.
- It may take more if the total is below N; or if h is below its share and the total is below N + R; or if h is 0 and
  it is a known client (one of the operator's keys: their number is bounded).

It follows that, taking one at a time, the total never exceeds N + R + the number of known clients; that a known client
is never refused its first; that a client below its share is refused only when the whole reserve is taken; and that a
client at or above its share gets nothing while the total is N or more: what is released then goes to the others first.
Depends on nothing else.
"""

from collections import Counter, OrderedDict, deque
from typing import NamedTuple


class Client(NamedTuple):
    """The holder of a share: a key by its name, or the clients of one network address."""

    name: str
    weight: float = 1.0
    known: bool = False  # a key of the operator


class FairShares:
    """Counts what each client holds. Clients that hold nothing are not remembered."""

    __slots__ = ("_held", "_total_weight", "total")

    def __init__(self) -> None:
        self._held: dict[str, int] = {}
        self._total_weight = 0.0
        self.total = 0

    def held(self, client: Client) -> int:
        return self._held.get(client.name, 0)

    def has_room(self, client: Client, limit: int) -> bool:
        """Whether a client may take more under the law above."""
        if self.total < limit:
            return True
        held = self.held(client)
        if not held:
            return client.known or self.total < limit + reserve_of(limit)
        return held < limit * client.weight / self._total_weight and self.total < limit + reserve_of(limit)

    def take(self, client: Client, amount: int = 1) -> None:
        """Without a check: see `has_room`."""
        before = self.held(client)
        if not before:
            self._total_weight += client.weight
        self._held[client.name] = before + amount
        self.total += amount

    def release(self, client: Client, amount: int = 1) -> None:
        left = self._held[client.name] - amount
        assert left >= 0, client
        self.total -= amount
        if left:
            self._held[client.name] = left
            return
        del self._held[client.name]
        self._total_weight = self._total_weight - client.weight if self._held else 0.0  # no rounding error stays


def reserve_of(limit: int) -> int:
    """Half as much again: a second client may then take its whole equal share at once."""
    return limit // 2


class ResponseBytes:
    """Bytes that responses hold, by response and by client. Those that hold nothing are not remembered."""

    __slots__ = ("by_client", "by_response", "num_bytes")

    def __init__(self) -> None:
        self.num_bytes = 0
        self.by_client: Counter[str] = Counter()
        self.by_response: Counter[str] = Counter()

    def add(self, client: str, response: str, num_bytes: int) -> None:
        """Count more; fewer, if it is negative."""
        self.num_bytes += num_bytes
        for sums, name in ((self.by_client, client), (self.by_response, response)):
            sums[name] += num_bytes
            if not sums[name]:
                del sums[name]

    def rank(self, client: str, response: str) -> tuple[int, int]:
        """The highest must give way: a response of the client with the most, and of those the largest."""
        return self.by_client[client], self.by_response[response]


_REMEMBERED_RELEASES = 32
_REMEMBERED_CLIENTS = 1024


class Throughput:
    """Releases per second over the latest few, in time during which something was held: idle time does not count."""

    __slots__ = ("_began_s", "_busy_s", "_num_held", "_releases")

    def __init__(self) -> None:
        self._num_held = 0
        self._began_s = 0.0  # when something was held, lately
        self._busy_s = 0.0  # before that
        self._releases: deque[float] = deque([0.0], maxlen=_REMEMBERED_RELEASES + 1)  # in busy time

    def note_taken(self, now_s: float) -> None:
        if not self._num_held:
            self._began_s = now_s
        self._num_held += 1

    def note_released(self, now_s: float) -> None:
        self._releases.append(self._busy(now_s))
        self._num_held -= 1
        if not self._num_held:
            self._busy_s = self._releases[-1]

    def wait_s(self, num_releases: int, now_s: float) -> float | None:
        """The expected time until this number of releases; None if there was none. Little's law."""
        num_seen = len(self._releases) - 1
        return num_releases * (self._busy(now_s) - self._releases[0]) / num_seen if num_seen else None

    def _busy(self, now_s: float) -> float:
        return self._busy_s + (now_s - self._began_s if self._num_held else 0.0)


class ClientRates:
    """The release rates of the latest clients. Bounded: of clients that hold nothing, the oldest are forgotten."""

    __slots__ = ("_idle", "_rates")

    def __init__(self) -> None:
        self._rates: dict[str, Throughput] = {}
        self._idle: OrderedDict[str, Throughput] = OrderedDict()

    def note_taken(self, client: Client, now_s: float) -> None:
        rate = self._rates.get(client.name)
        if rate is None:
            rate = self._idle.pop(client.name) if client.name in self._idle else Throughput()
            self._rates[client.name] = rate
        rate.note_taken(now_s)

    def note_released(self, client: Client, now_s: float, *, is_last: bool) -> None:
        self._rates[client.name].note_released(now_s)
        if is_last:
            self._idle[client.name] = self._rates.pop(client.name)
            if len(self._idle) > _REMEMBERED_CLIENTS:
                self._idle.popitem(last=False)

    def wait_s(self, client: Client, num_releases: int, now_s: float) -> float | None:
        rate = self._rates.get(client.name)
        return None if rate is None else rate.wait_s(num_releases, now_s)
