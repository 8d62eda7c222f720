"""The offline API for asyncio: a model in this process, awaited. Many tasks share one batch.

One thread owns the engine: it runs steps while there are requests, and between two steps what tasks ask for (submit,
abort). So a step never blocks the event loop, and a task that is cancelled ends its requests.
"""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import TypeVar, Unpack

from quire.config import SettingsDict, shows_settings
from quire.core.errors import EngineFailed
from quire.core.sampling import SamplingParams
from quire.engine.chat_request import chat_options, chat_params
from quire.engine.messages import RequestOptions, RequestOptionsDict, options_of
from quire.engine.model_format import DeclaredTool
from quire.engine.output_processor import Prompt
from quire.engine.outputs import EMBEDDING, Delta, EmbeddingOutput, RequestOutput, ScoringOutput
from quire.engine.request_state import RequestState
from quire.llm import LLM, Conversation, as_embedding, as_prompts, as_texts, numbered, pair_scores

T = TypeVar("T")
_WAKE_S = 0.5
_Update = Delta | Exception | None  # None: the request has ended


@contextmanager
def _waking_loop() -> Iterator[None]:
    """The event loop wakes twice a second: Jupyter's kernel cancels an interrupted cell without waking it."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def wake() -> None:
        nonlocal timer
        timer = loop.call_later(_WAKE_S, wake)

    wake()
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


class _AsyncReader:
    """Receives the deltas of one request on the event loop of its task."""

    __slots__ = ("_loop", "_queue", "state")

    def __init__(self, state: RequestState, loop: asyncio.AbstractEventLoop, queue: "asyncio.Queue[_Update]") -> None:
        self.state = state
        self._loop = loop
        self._queue = queue

    def put(self, update: _Update) -> None:
        """From the engine's thread. A loop that has ended reads nothing more."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, update)


class AsyncLLM:
    """`LLM` for asyncio: the same model, settings and methods, awaited; `stream` and `stream_chat` with `async for`."""

    @shows_settings
    def __init__(self, model: str | os.PathLike[str] | None = None, **settings: Unpack[SettingsDict]) -> None:
        """Load a model. Every setting has a default; sizes may be texts with a unit, such as "2GiB" or "32k"."""
        self._start(LLM(model, **settings))

    @classmethod
    def over(cls, llm: LLM) -> "AsyncLLM":
        """The same over a model that is loaded already. The `LLM` must not run requests meanwhile."""
        created = cls.__new__(cls)
        created._start(llm)
        return created

    def _start(self, llm: LLM) -> None:
        self._llm = llm
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._readers: dict[str, _AsyncReader] = {}
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="quire-async", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        return "Async" + repr(self._llm)

    @property
    def llm(self) -> LLM:
        """For its tokenizer and defaults; requests go through this object."""
        return self._llm

    async def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Unpack[RequestOptionsDict],
    ) -> list[RequestOutput]:
        """Complete one or many prompts, as `LLM.generate`."""
        many = as_prompts(prompts)
        return await self._outputs(
            many, self._llm.params_for(many, sampling_params), options_of(options, with_progress=False)
        )

    async def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[DeclaredTool] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        response_format: object = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptionsDict],
    ) -> list[RequestOutput]:
        """Answer one conversation or many, as `LLM.chat`."""
        llm = self._llm
        chat = chat_options(
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            chat_template_kwargs=chat_template_kwargs,
        )
        texts, prompts, params = llm.chat_prompts(messages, sampling_params, chat)
        outputs = await self._outputs(prompts, params, options_of(options, with_progress=False))
        return llm.parse_chats(outputs, texts, chat)

    async def embed(
        self, prompts: Prompt | Sequence[Prompt], **options: Unpack[RequestOptionsDict]
    ) -> list[EmbeddingOutput]:
        """Embeddings of one or many prompts, as `LLM.embed`."""
        many = as_prompts(prompts)
        outputs = await self._outputs(
            many, [EMBEDDING] * len(many), options_of(options, with_progress=False), pooled=True
        )
        return [as_embedding(output) for output in outputs]

    async def score(self, text_1: str | Sequence[str], text_2: str | Sequence[str]) -> list[ScoringOutput]:
        """How near texts are, as `LLM.score`."""
        left, right = as_texts("text_1", text_1), as_texts("text_2", text_2)
        return pair_scores(len(left), len(right), await self.embed([*left, *right]))

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text; nothing is awaited."""
        return self._llm.tokenize(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids; nothing is awaited."""
        return self._llm.detokenize(token_ids, skip_special_tokens=skip_special_tokens)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptionsDict]
    ) -> AsyncIterator[Delta]:
        """Complete one prompt, piece by piece. Leaving the loop, or cancelling its task, aborts the request."""
        params = self._llm.get_default_sampling_params() if sampling_params is None else sampling_params
        return self._deltas(prompt, params, options_of(options, with_progress=False))

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        response_format: object = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptionsDict],
    ) -> AsyncIterator[Delta]:
        """Answer one conversation, piece by piece."""
        llm = self._llm
        chat = chat_options(response_format=response_format, chat_template_kwargs=chat_template_kwargs)
        text = llm.render_chat(messages, chat)
        params = llm.chat_defaults() if sampling_params is None else sampling_params
        params = chat_params(params, llm.model_format, chat, text)
        return self._deltas(llm.chat_ids(text), params, options_of(options, with_progress=False))

    async def close(self) -> None:
        """End running requests and free the model's memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join)
        self._llm.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _deltas(self, prompt: Prompt, params: SamplingParams, options: RequestOptions) -> AsyncIterator[Delta]:
        queue: asyncio.Queue[_Update] = asyncio.Queue()
        [state] = await self._submit([(prompt, params)], options, queue, streaming=True)
        try:
            while True:
                update = await queue.get()
                if update is None:
                    return
                if isinstance(update, Exception):
                    raise update
                yield update
        finally:
            self._abandon([state])

    async def _outputs(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        options: RequestOptions,
        *,
        pooled: bool = False,
    ) -> list[RequestOutput]:
        if not prompts:
            return []
        queue: asyncio.Queue[_Update] = asyncio.Queue()
        states = await self._submit([*zip(prompts, params, strict=True)], options, queue, pooled=pooled)
        try:
            num_running = len(states)
            with _waking_loop():
                while num_running:
                    update = await queue.get()
                    if isinstance(update, Exception):
                        raise update
                    num_running -= update is None
            return [state.output() for state in states]
        finally:
            self._abandon(states)

    async def _submit(
        self,
        requests: Sequence[tuple[Prompt, SamplingParams]],
        options: RequestOptions,
        queue: "asyncio.Queue[_Update]",
        *,
        streaming: bool = False,
        pooled: bool = False,
    ) -> list[RequestState]:
        """Queue requests, all or none."""
        loop = asyncio.get_running_loop()

        def submit() -> list[RequestState]:
            states: list[RequestState] = []
            try:
                for place, (prompt, params) in enumerate(requests):
                    with numbered("Prompt", place, len(requests)):
                        state = self._llm.submit(prompt, params, options=options, streaming=streaming, pooled=pooled)
                    states.append(state)
            except BaseException:
                self._abort(states)
                raise
            for state in states:
                self._readers[state.request_id] = _AsyncReader(state, loop, queue)
            return states

        running = asyncio.ensure_future(self._on_engine_thread(submit))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:  # it may be submitted by now, or will be
            running.add_done_callback(self._abandon_late)
            raise

    def _abandon_late(self, done: "asyncio.Future[list[RequestState]]") -> None:
        if not done.cancelled() and done.exception() is None:
            self._abandon(done.result())

    async def _on_engine_thread(self, work: Callable[[], T]) -> T:
        if self._closed:
            raise EngineFailed("This AsyncLLM is closed; create a new one.")
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def settle(value: T | None, error: BaseException | None) -> None:
            if not result.done():
                result.set_exception(error) if error is not None else result.set_result(value)  # type: ignore[arg-type]

        def command() -> None:
            try:
                value, error = work(), None
            except BaseException as raised:
                value, error = None, raised
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(settle, value, error)

        self._commands.put(command)
        return await result

    def _abandon(self, states: Sequence[RequestState]) -> None:
        unfinished = [state for state in states if not state.finished]
        if unfinished:
            self._commands.put(lambda: self._abort(unfinished))

    def _abort(self, states: Sequence[RequestState]) -> None:
        for state in states:
            self._readers.pop(state.request_id, None)
            if not state.finished:
                self._llm.client.abort(state)

    # The engine's thread.

    def _run(self) -> None:
        while True:
            try:
                command = self._commands.get(block=not self._readers)
            except Empty:
                self._step()
                continue
            if command is None:
                self._fail(EngineFailed("This AsyncLLM was closed while the request ran."))
                return
            command()

    def _step(self) -> None:
        try:
            deltas = self._llm.client.step()
        except Exception as error:
            self._fail(error)
            return
        for delta in deltas:
            if delta.request_id in self._readers:
                self._readers[delta.request_id].put(delta)
        for request_id in dict.fromkeys(delta.request_id for delta in deltas):  # of several sequences, all deltas first
            reader = self._readers.get(request_id)
            if reader is not None and reader.state.finished:
                del self._readers[request_id]
                reader.put(None)

    def _fail(self, error: Exception) -> None:
        """End every request with an error."""
        for reader in [*self._readers.values()]:
            reader.put(error)
            self._abort([reader.state])
