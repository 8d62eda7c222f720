"""The offline API: a model in this process, prompts in, texts out."""

import gc
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from importlib.util import find_spec
from numbers import Integral
from typing import Unpack, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from quire.config import EngineConfig, SettingsDict, check_names, keywords_in_errors, shows_settings
from quire.core.errors import EngineFailed, InvalidParameter, InvalidPrompt, NoTokenizer, QuireError, shown
from quire.core.ids import RequestId
from quire.core.sampling import SamplingParams
from quire.core.step import FinishReason
from quire.engine.build import BuiltEngine, build
from quire.engine.chat_request import ChatOptions, chat_options, chat_params, parse_chat, render_chat
from quire.engine.local_client import (
    DeltaStream,
    LocalClient,
    PendingOutputs,
    check_not_forked,
    interrupts_deferred,
    note_engine_process,
)
from quire.engine.messages import RequestOptions, RequestOptionsDict, SubmitOptions, options_of
from quire.engine.model_format import DeclaredTool, ModelFormat, find_model_format
from quire.engine.open_model import default_params
from quire.engine.output_processor import Prompt, as_list
from quire.engine.outputs import EMBEDDING, EmbeddingOutput, RequestOutput, ScoringOutput, failure_of
from quire.engine.request_state import RequestState
from quire.engine.startup import StartupReporter
from quire.sched.explain import Explanation
from quire.text.tokenizer import Tokenizer

Message = Mapping[str, object]
Conversation = Sequence[Message]

_MAX_DIGITS = 18  # of a request's number
_NUM_UNREAD = 64  # deltas of a stream that other threads' steps left unread: its reader may be gone. Never tuned.


class LLM:
    """A loaded model. `LLM()` is the default one, `LLM("path, short name or hub id")` any other.

    Threads may share it: their prompts run in one batch. `close()`, or the end of a `with`, gives its memory back.
    """

    @shows_settings
    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        watch: StartupReporter | None = None,
        **settings: Unpack[SettingsDict],
    ) -> None:
        """Load a model. Every setting has a default; sizes may be texts with a unit, such as "2GiB" or "32k"."""
        check_names(settings)
        if "dtype" in settings:
            settings["dtype"] = str(settings["dtype"]).removeprefix("torch.")
        path = os.fspath(model) if isinstance(model, os.PathLike) else model
        config = EngineConfig(model=path, **settings)  # type: ignore[arg-type]  # EngineConfig parses and checks each
        check_not_forked()
        with keywords_in_errors():
            self._serve(build(config, watch), keywords_in_errors)

    @classmethod
    def over(cls, built: BuiltEngine) -> "LLM":
        """The same over an engine that was built elsewhere. Errors name settings as flags of the command line."""
        llm = cls.__new__(cls)
        llm._serve(built, nullcontext)
        return llm

    def _serve(self, built: BuiltEngine, in_errors: Callable[[], AbstractContextManager[None]]) -> None:
        note_engine_process()
        self._built: BuiltEngine | None = built
        self._client: LocalClient | None = LocalClient(built.engine, built.tokenizer)
        self._readers: WeakValueDictionary[str, DeltaStream | PendingOutputs] = WeakValueDictionary()  # by request
        self._abandoned: deque[RequestState] = deque()
        # Unread deltas of a stream at which garbage is collected, where it was collected for it before.
        self._look_at: WeakKeyDictionary[DeltaStream | PendingOutputs, int] = WeakKeyDictionary()
        self._format: ModelFormat | None = None
        self._in_errors = in_errors

    def __repr__(self) -> str:
        built = self._built
        if built is None:
            return "LLM(closed)"
        sizes = built.resolved
        return (
            f"LLM({built.name!r}, device={built.machine.device!r}, dtype={built.dtype!r}, "
            f"max_model_len={sizes.max_model_len}, max_num_seqs={sizes.max_num_seqs}, "
            f"KV cache of {sizes.num_blocks * sizes.block_size:,} tokens)"
        )

    @property
    def built(self) -> BuiltEngine:
        if self._built is None:
            raise _closed()
        return self._built

    def close(self) -> None:
        """Free the model's memory. No request may be running. Idempotent."""
        self._built = self._client = None
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def client(self) -> LocalClient:
        check_not_forked()  # on the compute path only: the tokenizer may be used in a forked process
        if self._client is None:
            raise _closed()
        return self._client

    def submit(self, prompt: Prompt, params: SamplingParams, **keywords: Unpack[SubmitOptions]) -> RequestState:
        """Queue a prompt; all other methods read its outputs."""
        with self._in_errors():
            return self.client.submit(prompt, params, **keywords)

    def get_tokenizer(self) -> Tokenizer:
        tokenizer = self.built.tokenizer
        if tokenizer is None:
            raise NoTokenizer("it cannot chat and accepts token ids only")
        return tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling defaults of the model's generation config; the library's defaults where it has none."""
        return default_params(self.built.checkpoint)

    def reset_prefix_cache(self) -> int:
        """Clear the prefix cache; the number of KV blocks freed."""
        with self.client.lock:
            return self.built.engine.scheduler.reset_cache()

    def explain(self, request_id: str) -> Explanation:
        """Queue waits, cache hits and preemptions of a request; `lines()` returns text."""
        if not isinstance(request_id, str) or not request_id.isdecimal() or len(request_id) > _MAX_DIGITS:
            raise InvalidParameter(
                f"request_id must be that of a RequestOutput, not {shown(request_id)}.", param="request_id"
            )
        with self.client.lock:
            return self.built.engine.explain(RequestId(int(request_id)))

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool | None = None,
        **options: Unpack[RequestOptionsDict],
    ) -> list[RequestOutput]:
        """Complete one or many prompts, each a text, a list of token ids or {"prompt_token_ids": ids}.

        One `SamplingParams` serves all prompts, or there is one for each. If any is refused, none is run. The terms
        (`priority`, `tenant`, `cache_salt`, `timeout_s`) are those of each prompt.
        """
        many = as_prompts(prompts)
        return self._run(many, self.params_for(many, sampling_params), options_of(options), progress)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[DeclaredTool] | None = None,
        tool_choice: str | Mapping[str, object] | None = None,
        response_format: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        progress: bool | None = None,
        **options: Unpack[RequestOptionsDict],
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template.

        Without sampling_params an answer may take the rest of the context. `response_format` is OpenAI's object or a
        pydantic model. With `tools`, in OpenAI's form, each output has its `tool_calls`.
        """
        chat = chat_options(
            tools=tools,
            tool_choice=tool_choice,
            response_format=response_format,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        texts, prompts, params = self.chat_prompts(messages, sampling_params, chat)
        return self.parse_chats(self._run(prompts, params, options_of(options), progress), texts, chat)

    def chat_prompts(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        chat: ChatOptions,
    ) -> tuple[list[str], Sequence[Prompt], list[SamplingParams]]:
        """One conversation or many as texts, token ids and parameters."""
        conversations = as_conversations(messages)
        texts = []
        for place, conversation in enumerate(conversations):
            with numbered("Conversation", place, len(conversations)):
                texts.append(self.render_chat(conversation, chat))
        prompts = [self.chat_ids(text) for text in texts]
        given = self.params_for(prompts, self.chat_defaults() if sampling_params is None else sampling_params)
        params = [chat_params(each, self.model_format, chat, text) for each, text in zip(given, texts, strict=True)]
        return texts, prompts, params

    def parse_chats(self, outputs: list[RequestOutput], texts: Sequence[str], chat: ChatOptions) -> list[RequestOutput]:
        """The outputs with their reasoning and tool calls; `texts`: what was asked."""
        for output, text in zip(outputs, texts, strict=True):
            for completion in output.outputs:
                parse_chat(completion, self.model_format, chat, text)
        return outputs

    @property
    def model_format(self) -> ModelFormat:
        """How the model writes tool calls and reasoning, by its chat template."""
        if self._format is None:
            tokenizer = self.get_tokenizer()
            self._format = find_model_format(tokenizer.chat_template, tokenizer)
        return self._format

    def render_chat(self, messages: Conversation, chat: ChatOptions) -> str:
        """The text of a chat's prompt."""
        return render_chat(self.get_tokenizer(), self.model_format, messages, chat)

    def chat_ids(self, text: str) -> Mapping[str, object]:
        return {"prompt_token_ids": self.get_tokenizer().encode_chat(text)}

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text."""
        if not isinstance(text, str):
            raise InvalidPrompt(f"tokenize takes one text, not {shown(text)}.", param="text")
        return self.get_tokenizer().encode(text, add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids."""
        ids = as_list(token_ids)
        listed = list(ids) if isinstance(ids, Sequence) and not isinstance(ids, str) else [ids]
        tokens = [int(each) if isinstance(each, Integral) else -1 for each in listed]
        if min(tokens, default=0) < 0:
            wrong = listed[next(i for i, token in enumerate(tokens) if token < 0)]
            raise InvalidPrompt(f"detokenize takes a list of token ids, not {shown(wrong)}.", param="token_ids")
        largest, num_ids = max(tokens, default=0), self.built.checkpoint.spec.vocab_size
        if largest >= num_ids:
            raise InvalidPrompt(
                f"There is no token {shown(largest)}: this model's ids run from 0 to {num_ids - 1}.", param="token_ids"
            )
        return self.get_tokenizer().decode(tokens, skip_special_tokens)

    def score(
        self, text_1: str | Sequence[str], text_2: str | Sequence[str], *, progress: bool | None = None
    ) -> list[ScoringOutput]:
        """How near texts are, by their embeddings: one text against each of several, or pairs of two equal lists."""
        left, right = as_texts("text_1", text_1), as_texts("text_2", text_2)
        return pair_scores(len(left), len(right), self.embed([*left, *right], progress=progress))

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, progress: bool | None = None, **options: Unpack[RequestOptionsDict]
    ) -> list[EmbeddingOutput]:
        """Embeddings of one or many prompts: the mean of the last hidden states, normalised to length 1.

        Raises the error of the first prompt that failed.
        """
        many = as_prompts(prompts)
        outputs = self._run(many, [EMBEDDING] * len(many), options_of(options), progress, pooled=True)
        return [as_embedding(output) for output in outputs]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, **options: Unpack[RequestOptionsDict]
    ) -> DeltaStream:
        """Complete one prompt, piece by piece. Leaving the loop early aborts the request.

        Beam search and best_of return each sequence in one piece, at the end.
        """
        params = self.get_default_sampling_params() if sampling_params is None else sampling_params
        request_options = options_of(options, with_progress=False)
        with self.client.lock:
            state = self.submit(prompt, params, options=request_options, streaming=True)
            stream = DeltaStream(self.client, state, self._step_for_stream, self._abandoned)
            self._readers[state.request_id] = stream
            return stream

    def stream_chat(
        self,
        messages: Conversation,
        sampling_params: SamplingParams | None = None,
        *,
        response_format: object = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **options: Unpack[RequestOptionsDict],
    ) -> DeltaStream:
        """Answer one conversation, piece by piece."""
        chat = chat_options(
            response_format=response_format,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        text = self.render_chat(messages, chat)
        params = self.chat_defaults() if sampling_params is None else sampling_params
        return self.stream(self.chat_ids(text), chat_params(params, self.model_format, chat, text), **options)

    def chat_prompt(
        self,
        messages: Conversation,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> Mapping[str, object]:
        """A conversation as the prompt that `generate` takes."""
        chat = chat_options(
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        return self.chat_ids(self.render_chat(messages, chat))

    def chat_defaults(self) -> SamplingParams:
        return replace(self.get_default_sampling_params(), max_tokens=None)

    def params_for(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if params is None:
            params = self.get_default_sampling_params()
        if isinstance(params, SamplingParams):
            return [params] * len(prompts)
        if not isinstance(params, Sequence):
            raise InvalidParameter(
                f"sampling_params must be a SamplingParams or a list of them, not {shown(params)}.",
                param="sampling_params",
            )
        if len(params) != len(prompts):
            raise InvalidParameter(
                f"There are {len(prompts)} prompts and {len(params)} sampling_params; give one, or one for each.",
                param="sampling_params",
            )
        return params

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        options: RequestOptions,
        progress: bool | None,
        *,
        pooled: bool = False,
    ) -> list[RequestOutput]:
        states: list[RequestState] = []
        try:
            with self.client.lock:  # no step before all of them are queued
                for place, (prompt, each) in enumerate(zip(prompts, params, strict=True)):
                    with numbered("Prompt", place, len(prompts)):
                        states.append(self.submit(prompt, each, options=options, pooled=pooled))
                pending = PendingOutputs(states)
                self._readers.update(dict.fromkeys((state.request_id for state in states), pending))
            self._wait(pending, progress)
        except BaseException:
            self._abort(states)
            raise
        return [state.output() for state in states]

    def _wait(self, pending: PendingOutputs, progress: bool | None) -> None:
        total = pending.num_pending
        console = Console(stderr=True)
        watched = console.is_jupyter or (sys.stderr is not None and sys.stderr.isatty())
        show = progress if progress is not None else total > 1 and watched
        as_text = show and console.is_jupyter and find_spec("ipywidgets") is None  # rich would only warn
        bar = Progress(
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"),
            console=console,
            disable=not show or as_text,
        )
        with bar, interrupts_deferred() as pass_on_interrupts:
            task = bar.add_task("generating", total=total, speed="")
            num_shown = 0
            while not pending.ready:
                self._step(pending)
                pass_on_interrupts()
                if num_shown < total - pending.num_pending:
                    num_shown = total - pending.num_pending
                    speed = pending.num_tokens / max(bar.tasks[0].elapsed or 0.0, 1e-3)
                    bar.update(task, completed=num_shown, speed=f"{speed:,.0f} tok/s")
                    if as_text:
                        end = "\n" if num_shown == total else ""
                        sys.stderr.write(f"\rgenerating {num_shown}/{total}, {speed:,.0f} tok/s{end}")

    def _step_for_stream(self, stream: DeltaStream) -> None:
        with interrupts_deferred():
            self._step(stream)

    def _step(self, reader: DeltaStream | PendingOutputs) -> None:
        """One step of the engine, unless another thread's was enough. Every reader gets its own deltas. Interrupts are
        deferred."""
        client = self.client
        with client.lock:
            if reader.ready:
                return
            while self._abandoned:
                self._abort([self._abandoned.popleft()])
            unread = False
            for delta in client.step():
                other = self._readers.get(delta.request_id)
                if other is not None:
                    other.put(delta)
                    unread = unread or other.num_unread >= self._look_at.get(other, _NUM_UNREAD)
            if unread:
                self._collect_streams()

    def _collect_streams(self) -> None:
        """Drop streams that only garbage refers to, such as the frames that a web framework leaves in a cycle. A
        collection of a large heap takes long: for a stream that stays, the next one is at twice as many deltas."""
        gc.collect()
        for reader in self._readers.values():
            self._look_at[reader] = max(2 * reader.num_unread, _NUM_UNREAD)

    def _abort(self, states: list[RequestState]) -> None:
        for state in states:
            if not state.finished:
                self.client.abort(state)


def _closed() -> EngineFailed:
    return EngineFailed("This LLM is closed; create a new one.")


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    """Many prompts from one or many; a flat list of ids is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed = as_list(prompts)
    if not isinstance(listed, Sequence) or isinstance(listed, bytes | bytearray):
        raise InvalidPrompt(f"A prompt is a text or token ids, not {type(prompts).__name__}.", param="prompt")
    if listed and isinstance(listed[0], Integral):
        return [cast(Sequence[int], listed)]
    return cast(Sequence[Prompt], listed)


@contextmanager
def numbered(what: str, place: int, total: int) -> Iterator[None]:
    """A refusal of one of several, such as a missing value in the column of a table, says which one."""
    try:
        yield
    except QuireError as error:
        if total > 1:
            error.message = f"{what} {place} of {total}, counted from 0: {error.message}"
            error.args = (error.message,)
        raise


def as_texts(name: str, given: object) -> list[str]:
    """One text or many, of the argument `name`, as a list."""
    texts = [given] if isinstance(given, str) else as_list(given)
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise InvalidParameter(f"{name} must be a text or a list of texts, not {shown(given)}.", param=name)
    return list(texts)


def as_embedding(output: RequestOutput) -> EmbeddingOutput:
    ids = output.prompt_token_ids
    failure = failure_of(FinishReason(output.outputs[0].finish_reason), len(ids), EMBEDDING)
    if failure is not None:
        raise failure
    assert output.embedding is not None, output
    return EmbeddingOutput(output.request_id, output.prompt, ids, output.embedding, output.metrics)


def pair_scores(num_left: int, num_right: int, embedded: Sequence[EmbeddingOutput]) -> list[ScoringOutput]:
    """The scores of pairs; a single text on the left is compared with each on the right."""
    if num_left not in (1, num_right):
        raise InvalidParameter(
            f"text_1 has {num_left} texts and text_2 has {num_right}: give one text_1, or as many as text_2.",
            param="text_1",
        )
    firsts, seconds = embedded[:num_left], embedded[num_left:]
    pairs = zip([*firsts] * num_right if num_left == 1 else firsts, seconds, strict=True)
    return [
        ScoringOutput(
            float(first.embedding @ second.embedding), len(first.prompt_token_ids) + len(second.prompt_token_ids)
        )
        for first, second in pairs
    ]


def as_conversations(messages: Conversation | Sequence[Conversation]) -> Sequence[Conversation]:
    given: object = messages
    if not isinstance(given, Sequence) or isinstance(given, str | bytes):
        raise InvalidPrompt(
            f"messages must be a list of objects with role and content, not {shown(messages)}; one question is "
            f'[{{"role": "user", "content": "…"}}].',
            param="messages",
        )
    if messages and isinstance(messages[0], Mapping):
        return [cast(Conversation, messages)]
    return cast(Sequence[Conversation], messages)
