"""One or several calls of the engine, heard as one: the prompts of a request. The one place that submits."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from quire.engine.outputs import RequestOutput
from quire.server.async_engine import AsyncEngine, News, RequestStream
from quire.server.request.params import GenerationRequest


class PromptDelta(NamedTuple):
    """News of one of the prompts."""

    prompt: int
    update: News


class PromptGroup:
    """Whoever makes one must `leave` it, however it ends."""

    __slots__ = ("_calls", "_engine", "_waiting")

    def __init__(
        self, engine: AsyncEngine, prompts: Sequence[list[int]], generation: GenerationRequest, *, streaming: bool
    ) -> None:
        assert generation.grammar == generation.params.grammar, "a grammar reaches the engine through a Constrainer"
        self._engine = engine
        self._calls: list[RequestStream] = []
        self._waiting: dict[asyncio.Future[News], int] = {}
        try:
            for ids in prompts:
                call = engine.submit(
                    ids,
                    generation.params,
                    terms=generation.terms,
                    streaming=streaming,
                    without_tokens=generation.without_tokens,
                )
                self._calls.append(call)
        except BaseException:
            self.leave()
            raise
        if len(self._calls) > 1:
            self._waiting = {asyncio.ensure_future(call.hear()): place for place, call in enumerate(self._calls)}

    async def hear(self) -> PromptDelta:
        """The next news of anybody. Of each prompt the last is its whole output; errors are raised."""
        if len(self._calls) == 1:
            return PromptDelta(0, await self._calls[0].hear())
        done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        first = min(done, key=self._waiting.__getitem__)
        place = self._waiting.pop(first)
        update = first.result()
        if not isinstance(update, RequestOutput):
            self._waiting[asyncio.ensure_future(self._calls[place].hear())] = place
        return PromptDelta(place, update)

    async def outputs(self) -> list[RequestOutput]:
        """Everybody's whole output, in the order of the prompts."""
        whole: dict[int, RequestOutput] = {}
        while len(whole) < len(self._calls):
            place, update = await self.hear()
            if isinstance(update, RequestOutput):
                whole[place] = update
        return [whole[place] for place in sorted(whole)]

    def leave(self) -> None:
        """Nobody listens any more. Twice does no harm."""
        for waiting in self._waiting:
            if not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # seen: one error answers for the whole request
        for call in self._calls:
            self._engine.leave(call)
