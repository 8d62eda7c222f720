"""Several engines behind one router, simulated: replicas that do everything, or prefill and decode engines.

Each engine is the shipped scheduler on a simulated machine with a clock of its own; requests are routed, and prompts
split, by the rules of the server. A prefill engine computes the whole blocks of a prompt. Then they are copied into
blocks that the decode engine holds free for them, one prompt after the other, while both go on; the decode engine
computes the rest and generates the tokens. Prompts that find no room are computed by the decode engine.
"""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from enum import Enum
from math import inf
from typing import NamedTuple

from quire.core.ids import RequestId
from quire.core.request import BlockOwner, Request
from quire.sched.prefix_router import CHUNK_TOKENS, REQUEST_TOKENS, PrefixRouter, prefix_hashes
from quire.sched.prompt_split import (
    NO_COSTS,
    DecodeLoad,
    PrefillCosts,
    PrefillLoad,
    TransferTimes,
    choose,
    prefill_costs,
)
from quire.sim.simulator import SimulatedArrival, Simulation


class SplitPolicy(Enum):
    """Which prompts go to a prefill engine."""

    ALL = "all"
    BY_COST = "by cost"


class PoolSizes(NamedTuple):
    """Engines by role. Without prefill engines, each of the others does everything."""

    num_prefill: int
    num_decode: int


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Between a prefill and a decode engine."""

    bytes_per_s: float
    bytes_per_token: int
    handoff_s: float  # messages between the engines

    def copy_s(self, num_tokens: int) -> float:
        return num_tokens * self.bytes_per_token / self.bytes_per_s


class RequestTimes(NamedTuple):
    """When a request had its first and its last token; infinite if it never had."""

    first_s: float = inf
    last_s: float = inf


@dataclass(slots=True)
class _Engine:
    """One engine, and what its router knows of it."""

    simulation: Simulation
    longest: int  # tokens of a request
    waiting: dict[int, int] = field(default_factory=dict)  # prompt tokens, until the first token
    num_waiting_tokens: int = 0
    num_open: int = 0  # requests of clients; those whose prompts are elsewhere are held
    num_held: int = 0
    link_free_s: float = 0.0  # when its last copy has ended
    _costs: PrefillCosts = NO_COSTS
    _version: int = -1

    def add(self, arrival: SimulatedArrival, num_uncached: int) -> None:
        self.waiting[int(arrival.request.id)] = num_uncached
        self.num_waiting_tokens += num_uncached
        self.simulation.arrive(arrival)

    def start(self, number: int) -> None:
        self.num_waiting_tokens -= self.waiting.pop(number, 0)

    @property
    def costs(self) -> PrefillCosts:
        table = self.simulation.scheduler.cost
        if table.version != self._version:
            self._costs, self._version = prefill_costs(table, self.longest), table.version
        return self._costs


class _SplitPrompt(NamedTuple):
    request: Request
    rank: int  # of the decode engine
    hashes: Many[int]


class ClusterSimulation:
    """One run of some requests, in the order of their arrivals."""

    def __init__(
        self,
        sizes: PoolSizes,
        make: Callable[[], Simulation],
        longest: int,
        link: LinkSpeed,
        policy: SplitPolicy = SplitPolicy.ALL,
    ) -> None:
        self._prefill = [_Engine(make(), longest) for _ in range(sizes.num_prefill)]
        self._decode = [_Engine(make(), longest) for _ in range(sizes.num_decode)]
        self._link = link
        self._policy = policy
        self._prefill_router = PrefixRouter(sizes.num_prefill)
        self._router = PrefixRouter(sizes.num_decode)
        self._block_size = self._decode[0].simulation.scheduler.kv.block_size
        self._split: dict[int, _SplitPrompt] = {}  # at prefill engines
        self.times: dict[int, RequestTimes] = {}
        self.num_split = 0
        self.num_without_room = 0

    def run(self, arrivals: Many[SimulatedArrival]) -> Iterator[int]:
        """The number of each request when it has its last token."""
        for arrival in sorted(arrivals, key=lambda each: each.at_s):
            yield from self._advance(arrival.at_s)
            self._route(arrival)
        yield from self._advance(inf)

    def _advance(self, until_s: float) -> Iterator[int]:
        """Prefill engines first: what they hand over arrives later than this."""
        for engine in self._prefill:
            for output in engine.simulation.turns(until_s):
                for first in () if output is None else output.first_tokens:
                    engine.start(first.number)
                    self._hand_over(first.number, engine.simulation.now_s)
        for engine in self._decode:
            now = engine.simulation
            for output in now.turns(until_s):
                if output is None:
                    continue
                for first in output.first_tokens:
                    engine.start(first.number)
                    self.times[first.number] = RequestTimes(now.now_s)
                for over in output.finished:
                    engine.num_open -= 1
                    self.times[over.number] = self.times[over.number]._replace(last_s=now.now_s)
                    yield over.number

    def _route(self, arrival: SimulatedArrival) -> None:
        """As `ReplicatedEngine.submit` does it."""
        hashes = prefix_hashes("", arrival.request.prompt.tolist())
        rank = self._router.choose({rank: each.num_open for rank, each in enumerate(self._decode)}, hashes)
        num_cached = CHUNK_TOKENS * self._router.num_known(rank, hashes)
        engine = self._decode[rank]
        splits = bool(self._prefill) and self._begin_split(arrival, rank, num_cached, hashes)
        self._router.note(rank, () if splits else hashes)
        engine.num_open += 1
        if not splits:
            engine.add(arrival, len(arrival.request.prompt) - num_cached)

    def _begin_split(self, arrival: SimulatedArrival, decode_rank: int, num_cached: int, hashes: Many[int]) -> bool:
        request, decode = arrival.request, self._decode[decode_rank]
        num_prompt = len(request.prompt)
        num_whole = (num_prompt - 1) // self._block_size * self._block_size
        if num_whole <= num_cached:
            return False
        loads = {rank: each.num_waiting_tokens // REQUEST_TOKENS for rank, each in enumerate(self._prefill)}
        rank = self._prefill_router.choose(loads, hashes)
        prefill = self._prefill[rank]
        num_known = min(CHUNK_TOKENS * self._prefill_router.num_known(rank, hashes), num_whole)
        if self._policy is SplitPolicy.BY_COST:
            times = TransferTimes(self._link.copy_s(num_whole - num_cached), self._link.handoff_s)
            num_decoding = decode.num_open - len(decode.waiting) - decode.num_held
            here = DecodeLoad(decode.costs, num_cached, decode.num_waiting_tokens, num_decoding)
            there = PrefillLoad(prefill.costs, num_known, prefill.num_waiting_tokens)
            if not choose(num_prompt, here, there, times).splits:
                return False
        self._prefill_router.note(rank, hashes)
        self._split[int(request.id)] = _SplitPrompt(request, decode_rank, hashes)
        self.num_split += 1
        decode.num_held += 1
        part = replace(request, prompt=request.prompt[:num_whole], max_tokens=1)
        prefill.add(arrival._replace(request=part), num_whole - num_known)
        return True

    def _hand_over(self, number: int, now_s: float) -> None:
        """A prompt is computed: its blocks are copied as soon as the link of the decode engine is free."""
        request, rank, hashes = self._split.pop(number)
        decode = self._decode[rank]
        decode.num_held -= 1
        num_whole = (len(request.prompt) - 1) // self._block_size * self._block_size
        owner = BlockOwner(RequestId(number), "", 0)
        held = decode.simulation.scheduler.hold_prefix(owner, request.prompt[:num_whole], with_room=True)
        begin_s = now_s + self._link.handoff_s
        if held is None:
            self.num_without_room += 1
            decode.add(SimulatedArrival(begin_s, request), len(request.prompt))
            return
        done_s = max(begin_s, decode.link_free_s) + self._link.copy_s(len(held.room) * self._block_size)
        decode.link_free_s = done_s
        decode.add(SimulatedArrival(done_s, request, held.number), len(request.prompt) - num_whole)
        self._router.note(rank, hashes)
