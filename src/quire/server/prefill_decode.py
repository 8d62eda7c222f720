"""Prefill/decode split: some prompts are computed by prefill engines, and their KV blocks copied by the decode engine.

Which prompts is decided by cost (`sched/prompt_split.py`): predictions of both engines, their queues, and transfers
as they were measured. A request is open at its decode engine from the start, but not sent to it. A prefill engine
computes the whole blocks of its prompt and leases them; the decode engine copies them into its prefix cache, those of
a prompt with several chunks while the rest is computed; then the request is sent and finds them cached. Whatever
fails on the way, the request is sent all the same, with the reason, and its prompt is computed there. Does not depend
on HTTP.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from quire.core.errors import QuireError
from quire.core.sampling import SamplingParams
from quire.engine.messages import ImportPrefix, ImportReply, LeasePrefix, LeaseReply, PromptTransfer, ReleaseLease
from quire.engine.prefix_transfer import TransferFailure
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
_LEAST_WAIT_S = 5e-3  # between two looks at what is computed of a prompt

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
        request, size = stream.state.request, decode.info.block_size
        prompt = request.prompt[: (len(request.prompt) - 1) // size * size]  # the rest is computed where it decodes
        handover = _Handover(self.engines[rank], decode, stream, prompt, self._clock, self._transfers)
        try:
            num_cached = await self._prefill(rank, handover, hashes)
            reply = await handover.copy()
        except (EngineLost, EngineRestarting):
            return ImportReply(failure=TransferFailure.ENGINE_LOST)
        except QuireError as error:
            _log.warning("a prefill engine refused a prompt of %d tokens: %s", len(prompt), error.message)
            return ImportReply(failure=TransferFailure.REFUSED)
        if reply.failure is not None:
            return reply
        stream.state.num_copied = max(handover.num_tokens - num_cached, 0)
        return reply._replace(num_tokens=handover.num_tokens, num_bytes=handover.num_bytes)

    async def _prefill(self, rank: int, handover: "_Handover", hashes: Sequence[int]) -> int:
        """Compute a prompt, and copy what is computed of it before its last chunk; how many of its tokens were cached
        there before. Cancelled, it aborts the computation; a lease would expire."""
        engine, prompt, options = self.engines[rank], handover.prompt, handover.stream.state.request.options
        num_known = CHUNK_TOKENS * self._router.num_known(rank, hashes)
        self.num_submitted[rank] += 1
        before_s = engine.costs.queue_s(engine.num_waiting_tokens) if engine.costs.known else 0.0
        computing = engine.submit(prompt, _PROMPT_ALONE, options=options, without_tokens=True)
        copying = asyncio.get_running_loop().create_task(handover.copy_chunks(num_known, before_s))
        try:
            engine.expect_prompt(computing, max(len(prompt) - num_known, 0))
            self._router.note(rank, hashes)
            num_cached = (await computing.output()).metrics.num_cached_tokens
            handover.is_computed.set()
            await copying
            return num_cached
        finally:
            computing.close()
            copying.cancel()  # of a prompt that is computed no further: its lease is released


class _Handover:
    """The blocks of one prompt on their way from a prefill engine to a decode engine: as its chunks are computed, and
    the rest at its end. Each part is in the prefix cache of the decode engine once it is copied, and holds nothing: a
    prompt that is computed no further leaves cached blocks, no others."""

    def __init__(
        self,
        prefill: AsyncEngine,
        decode: AsyncEngine,
        stream: RequestStream,
        prompt: list[int],
        clock: Callable[[], float],
        transfers: MeasuredTransfers,
    ) -> None:
        self.prompt = prompt
        self.stream = stream
        self.num_tokens = 0  # copied
        self.num_bytes = 0
        self.is_computed = asyncio.Event()
        self._prefill, self._decode = prefill, decode
        self._clock, self._transfers = clock, transfers

    async def copy_chunks(self, num_known: int, before_s: float) -> None:
        """Until the prompt is computed: after the time that each chunk is predicted to take, copy what is there. The
        prompts before it are predicted to take `before_s`."""
        costs, info = self._prefill.costs, self._decode.info
        if not costs.known or info is None or info.device == "cuda":  # two engines on one GPU: a copy delays the prompt
            return
        begun_s, stop = self._clock() + before_s, num_known + costs.largest_chunk
        while stop < len(self.prompt):
            left_s = begun_s + costs.alone_s(num_known, stop) - self._clock()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.is_computed.wait(), max(left_s, _LEAST_WAIT_S))
                return
            try:
                await self.copy()
            except QuireError:  # the prompt's own end says what happened
                return
            stop += costs.largest_chunk

    async def copy(self) -> ImportReply:
        """Copy what is computed by now and missing in the decode engine."""
        options = self.stream.state.request.options
        body = await self._prefill.ask(lambda token: LeasePrefix(token, options.partition, self.prompt))
        leased = msgspec.json.decode(body, type=LeaseReply)
        if leased.lease is None:
            return ImportReply(failure=leased.failure or TransferFailure.NOT_CACHED)
        lease, leased_s, number = leased.lease, self._clock(), self.stream.state.request.number
        try:
            body = await self._decode.ask(
                lambda token: ImportPrefix(token, number, options.partition, options.priority, self.prompt, lease)
            )
            reply = msgspec.json.decode(body, type=ImportReply)
            if reply.failure is None:
                handoff_s = max(self._clock() - leased_s - reply.copy_s, 0.0)
                self._transfers.note(reply.num_bytes, TransferTimes(reply.copy_s, handoff_s))
                self.num_tokens += reply.num_tokens
                self.num_bytes += reply.num_bytes
            return reply
        finally:
            self._prefill.send(ReleaseLease(lease.address.slot, lease.address.generation))
