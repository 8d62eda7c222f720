"""Prompt group: several prompts of one HTTP request as one stream. A single prompt is a plain `RequestStream`."""

import asyncio
from collections.abc import Sequence

from quire.engine.outputs import RequestOutput
from quire.server.async_engine import AsyncEngine, RequestStream, StreamItem
from quire.server.request.params import GenerationRequest


def submit(engine: AsyncEngine, ids: list[int], generation: GenerationRequest, *, streaming: bool) -> RequestStream:
    """Submit one prompt. The caller must `close` the stream, however it ends."""
    assert generation.grammar == generation.params.grammar, "a grammar must be precompiled first"
    return engine.submit(
        ids,
        generation.params,
        options=generation.options,
        streaming=streaming,
        without_tokens=generation.without_tokens,
    )


class PromptGroup:
    """The caller must `close` it, however it ends."""

    __slots__ = ("_streams", "_waiting")

    def __init__(
        self, engine: AsyncEngine, prompts: Sequence[list[int]], generation: GenerationRequest, *, streaming: bool
    ) -> None:
        self._streams: list[RequestStream] = []
        self._waiting: dict[asyncio.Future[StreamItem], int] = {}
        try:
            for ids in prompts:
                self._streams.append(submit(engine, ids, generation, streaming=streaming))
        except BaseException:
            self.close()
            raise
        if len(self._streams) > 1:
            self._waiting = {asyncio.ensure_future(each.receive()): place for place, each in enumerate(self._streams)}

    async def receive(self) -> tuple[int, StreamItem]:
        """The next item of any prompt, and its place. The last item of each prompt is its output; errors are raised."""
        if len(self._streams) == 1:  # without a task per item
            return 0, await self._streams[0].receive()
        done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
        first = min(done, key=self._waiting.__getitem__)
        place = self._waiting.pop(first)
        item = first.result()
        if not isinstance(item, RequestOutput):
            self._waiting[asyncio.ensure_future(self._streams[place].receive())] = place
        return place, item

    async def outputs(self) -> list[RequestOutput]:
        """The outputs of all prompts, in their order, when all have finished."""
        outputs: dict[int, RequestOutput] = {}
        while len(outputs) < len(self._streams):
            place, item = await self.receive()
            if isinstance(item, RequestOutput):
                outputs[place] = item
        return [outputs[place] for place in sorted(outputs)]

    def close(self) -> None:
        """Abort what is unfinished. Idempotent."""
        for waiting in self._waiting:
            if not waiting.cancel() and not waiting.cancelled():
                waiting.exception()  # retrieved: one error is the response to the whole request
        for stream in self._streams:
            stream.close()
