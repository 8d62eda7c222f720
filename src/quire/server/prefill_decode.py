"""Prefill/decode split: long prompts are computed by prefill engines, and their KV blocks copied by the decode engine.

A request is open at its decode engine from the start, but not sent to it. A prefill engine computes the whole blocks of
its prompt and leases them; the decode engine copies them into its prefix cache; then the request is sent and finds them
cached. Whatever fails on the way, the request is sent all the same, with the reason, and computes its prompt itself.
Does not depend on HTTP.
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
from quire.sched.prefix_router import REQUEST_TOKENS, PrefixRouter
from quire.server.async_engine import AsyncEngine, EngineLost, EngineRestarting
from quire.server.http.request_context import CURRENT_CONTEXT
from quire.server.request_stream import RequestStream

MIN_SPLIT_TOKENS = 512  # of a prompt that the decode engine has not cached; below, a transfer saves too little
_PROMPT_ALONE = SamplingParams(max_tokens=1, temperature=0.0)

_log = logging.getLogger(__name__)


class SplitRequest(NamedTuple):
    """What came of one request, for metrics."""

    num_bytes: int
    failure: TransferFailure | None


class PrefillEngines:
    """Chooses a prefill engine for a prompt, and follows the prompt until the decode engine has its blocks."""

    def __init__(self, engines: Sequence[AsyncEngine], clock: Callable[[], float]) -> None:
        self.engines = engines
        self._clock = clock
        self._router = PrefixRouter(len(engines))
        self._open_tokens = [0] * len(engines)  # of prompts that are being computed
        self._tasks: set[asyncio.Task[None]] = set()
        self.num_submitted = [0] * len(engines)
        self.is_ready: Callable[[int], bool] = lambda rank: True
        self.ended: Callable[[SplitRequest], None] = lambda split: None
        for rank, engine in enumerate(engines):
            engine.lost = lambda rank=rank: self._router.forget(rank)  # type: ignore[misc]

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
        ready = {
            rank: self._open_tokens[rank] // REQUEST_TOKENS
            for rank, engine in enumerate(self.engines)
            if engine.attached and self.is_ready(rank)
        }
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
        options = request.options
        try:
            body = await decode.ask(
                lambda token: ImportPrefix(token, request.number, options.partition, options.priority, prompt, lease)
            )
            reply = msgspec.json.decode(body, type=ImportReply)
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
        self._open_tokens[rank] += len(prompt)
        self.num_submitted[rank] += 1
        try:
            computing = engine.submit(prompt, _PROMPT_ALONE, options=options, without_tokens=True)
            try:
                self._router.note(rank, hashes)
                num_cached = (await computing.output()).metrics.num_cached_tokens
            finally:
                computing.close()
        finally:
            self._open_tokens[rank] -= len(prompt)
        body = await engine.ask(lambda token: LeasePrefix(token, options.partition, prompt))
        reply = msgspec.json.decode(body, type=LeaseReply)
        return reply.lease or reply.failure or TransferFailure.NOT_CACHED, num_cached
