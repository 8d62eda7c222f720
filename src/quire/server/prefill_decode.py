"""Prefill/decode split: some prompts are computed by prefill engines, and their KV blocks copied by the decode engine.

Which prompts is decided by cost (`sched/prompt_split.py`): predictions of both engines, their queues, and transfers as
they were measured. A request is open at its decode engine from the start, but not sent to it. A prefill engine computes
the whole blocks of its prompt and leases them; the decode engine copies them into its prefix cache; then the request is
sent and finds them cached. Whatever fails on the way, the request is sent all the same, with the reason, and its prompt
is computed there. Does not depend on HTTP.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from quire.core.errors import QuireError
from quire.core.sampling import SamplingParams
from quire.engine.messages import ImportPrefix, ImportReply, LeasePrefix, LeaseReply, PromptTransfer, ReleaseLease
from quire.engine.prefix_transfer import PrefixLease, TransferFailure
from quire.sched.prefix_router import CHUNK_TOKENS, REQUEST_TOKENS, PrefixRouter
from quire.sched.prompt_split import (
    USUAL_BYTES_PER_S,
    USUAL_GPU_BYTES_PER_S,
    DecodeLoad,
    MeasuredTransfers,
    PrefillLoad,
    SplitChoice,
    TransferTimes,
    choose,
)
from quire.server.async_engine import AsyncEngine, EngineLost, EngineRestarting
from quire.server.http.request_context import CURRENT_CONTEXT
from quire.server.request_stream import RequestStream

_PROMPT_ALONE = SamplingParams(max_tokens=1, temperature=0.0)

_log = logging.getLogger(__name__)


class SplitRequest(NamedTuple):
    """What came of one request, for metrics."""

    num_bytes: int
    failure: TransferFailure | None


class PromptRouting(NamedTuple):
    """Whether a prompt goes to a prefill engine, and why; for `explain`."""

    splits: bool
    text: str


_NO_BLOCK = PromptRouting(False, "the prompt was not sent to a prefill engine: no whole block of it is missing here")
_NO_COSTS = PromptRouting(False, "the prompt was not sent to a prefill engine: the costs of prompts are not known yet")
READS_PROMPT = PromptRouting(False, "the prompt was not sent to a prefill engine: its outputs are of the whole prompt")


class PrefillEngines:
    """Chooses a prefill engine for a prompt, and follows the prompt until the decode engine has its blocks."""

    def __init__(
        self, engines: Sequence[AsyncEngine], clock: Callable[[], float], rule: Callable[..., SplitChoice] = choose
    ) -> None:
        self.engines = engines
        self._rule = rule
        self._clock = clock
        self._router = PrefixRouter(len(engines))
        self._transfers = MeasuredTransfers()
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_submitted = [0] * len(engines)
        self.is_ready: Callable[[int], bool] = lambda rank: True
        self.ended: Callable[[SplitRequest], None] = lambda split: None
        for rank, engine in enumerate(engines):
            engine.lost = lambda rank=rank: self._router.forget(rank)  # type: ignore[misc]

    def route(self, num_prompt: int, decode: AsyncEngine, num_cached: int, hashes: Sequence[int]) -> PromptRouting:
        """Where a prompt is computed, if a decode engine has its first tokens cached. Without a prefill engine that is
        ready, as if there were an idle one: the transfer fails, and the reason is counted."""
        if decode.info is None or not decode.costs.known:
            return _NO_COSTS
        size = decode.info.block_size
        num_whole = (num_prompt - 1) // size * size
        if num_whole <= num_cached:
            return _NO_BLOCK
        loads = self._loads()
        there = PrefillLoad(decode.costs, num_cached, 0)
        if loads:
            rank = self._router.choose(loads, hashes)
            engine, num_known = self.engines[rank], CHUNK_TOKENS * self._router.num_known(rank, hashes)
            costs = engine.costs if engine.costs.known else decode.costs
            there = PrefillLoad(costs, min(num_known, num_whole), engine.num_waiting_tokens)
        here = DecodeLoad(decode.costs, num_cached, decode.num_waiting_tokens, decode.num_decoding)
        num_bytes = decode.info.kv_bytes_per_token * (num_whole - num_cached)
        usual = USUAL_GPU_BYTES_PER_S if decode.info.device == "cuda" else USUAL_BYTES_PER_S
        choice = self._rule(num_prompt, here, there, self._transfers.expected(num_bytes, usual))
        sent = "sent" if choice.splits else "not sent"
        return PromptRouting(choice.splits, f"the prompt was {sent} to a prefill engine: {choice.text}")

    def _loads(self) -> dict[int, int]:
        """Of the engines that are ready: their prompt tokens as a number of requests."""
        return {
            rank: engine.num_waiting_tokens // REQUEST_TOKENS
            for rank, engine in enumerate(self.engines)
            if engine.attached and self.is_ready(rank)
        }

    def begin(
        self, stream: RequestStream, decode: AsyncEngine, hashes: Sequence[int], sent: Callable[[], None]
    ) -> None:
        """Compute the prompt of a held request, and send the request to its decode engine afterwards."""
        task = asyncio.get_running_loop().create_task(self._split(stream, decode, hashes, sent))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        stream.on_end = task.cancel

    async def _split(
        self, stream: RequestStream, decode: AsyncEngine, hashes: Sequence[int], sent: Callable[[], None]
    ) -> None:
        CURRENT_CONTEXT.set(None)  # of this task: the prompt is counted once
        started_s = self._clock()
        try:
            reply = await self._transfer(stream, decode, hashes)
        except Exception:
            _log.exception("a prompt could not be computed by a prefill engine")
            reply = ImportReply(failure=TransferFailure.REFUSED)
        self.ended(SplitRequest(reply.num_bytes, reply.failure))
        decode.send_held(stream, PromptTransfer(reply.num_tokens, self._clock() - started_s, reply.failure))
        sent()

    async def _transfer(self, stream: RequestStream, decode: AsyncEngine, hashes: Sequence[int]) -> ImportReply:
        ready = self._loads()
        if not ready or decode.info is None:
            return ImportReply(failure=TransferFailure.NO_ENGINE)
        rank = self._router.choose(ready, hashes)
        engine, request, size = self.engines[rank], stream.state.request, decode.info.block_size
        prompt = request.prompt[: (len(request.prompt) - 1) // size * size]  # the rest is computed where it decodes
        try:
            lease, num_cached = await self._prefill(rank, prompt, stream, hashes)
        except (EngineLost, EngineRestarting):
            return ImportReply(failure=TransferFailure.ENGINE_LOST)
        except QuireError as error:
            _log.warning("a prefill engine refused a prompt of %d tokens: %s", len(prompt), error.message)
            return ImportReply(failure=TransferFailure.REFUSED)
        if isinstance(lease, TransferFailure):
            return ImportReply(failure=lease)
        options, leased_s = request.options, self._clock()
        try:
            body = await decode.ask(
                lambda token: ImportPrefix(token, request.number, options.partition, options.priority, prompt, lease)
            )
            reply = msgspec.json.decode(body, type=ImportReply)
            if reply.failure is None:
                handoff_s = max(self._clock() - leased_s - reply.copy_s, 0.0)
                self._transfers.note(reply.num_bytes, TransferTimes(reply.copy_s, handoff_s))
            stream.state.num_copied = max(reply.num_tokens - num_cached, 0)
            return reply
        finally:
            engine.send(ReleaseLease(lease.address.slot, lease.address.generation))

    async def _prefill(
        self, rank: int, prompt: list[int], stream: RequestStream, hashes: Sequence[int]
    ) -> tuple[PrefixLease | TransferFailure, int]:
        """Compute a prompt and lease its blocks; how many of its tokens were cached there before. Cancelled, it aborts
        the computation; a lease would expire."""
        engine, options = self.engines[rank], stream.state.request.options
        num_known = CHUNK_TOKENS * self._router.num_known(rank, hashes)
        self.num_submitted[rank] += 1
        computing = engine.submit(prompt, _PROMPT_ALONE, options=options, without_tokens=True)
        try:
            engine.expect_prompt(computing, max(len(prompt) - num_known, 0))
            self._router.note(rank, hashes)
            num_cached = (await computing.output()).metrics.num_cached_tokens
        finally:
            computing.close()
        body = await engine.ask(lambda token: LeasePrefix(token, options.partition, prompt))
        reply = msgspec.json.decode(body, type=LeaseReply)
        return reply.lease or reply.failure or TransferFailure.NOT_CACHED, num_cached
