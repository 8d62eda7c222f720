"""A model in this process, for `quire chat` and `quire run`. Replies end between two engine steps, never inside one."""

from collections.abc import Callable, Mapping, Sequence

from quire.catalog.names import DEFAULT_MODEL
from quire.cli.load_model import NamedModel, open_named, start
from quire.cli.models import ModelState, entries
from quire.cli.options import sampling_params
from quire.cli.printed_reply import Conversation, ReplyEnd, StopRequest
from quire.core.errors import QuireError
from quire.engine.chat_request import chat_options
from quire.engine.outputs import failure_of
from quire.llm import LLM
from quire.output_parsing.events import OutputEvent, OutputParser, PlainText, ReasoningText


class LocalModel:
    """A loaded model, and the options of the command that loaded it."""

    def __init__(self, model: NamedModel, given: Mapping[str, object], *, report: bool) -> None:
        self._given = given
        self._report = report
        self._named = model
        self._llm = LLM.over(start(model, report=report))

    @property
    def name(self) -> str:
        return self._named.config.model or DEFAULT_MODEL.name

    def names(self) -> Sequence[str]:
        """Those on this machine."""
        return (
            self.name,
            *(each.name for each in entries() if each.state is ModelState.PRESENT and each.name != self.name),
        )

    def choose(self, name: str) -> None:
        """Load another model instead of this one. If that fails, this one is loaded again."""
        chosen = open_named(name, self._given)
        self._llm.close()
        try:
            self._llm = LLM.over(start(chosen, report=self._report))
            self.check_chat()
        except QuireError:
            self._llm.close()
            self._llm = LLM.over(start(self._named, report=False))
            raise
        self._named = chosen

    def check_chat(self) -> None:
        """Refuses a model without a chat template."""
        self._llm.chat_prompt([{"role": "user", "content": "hi"}])

    def reply(
        self,
        prompt: str | Conversation,
        settings: Mapping[str, object],
        show: Callable[[str, bool], None],
        stop: StopRequest,
    ) -> ReplyEnd:
        client = self._llm.client
        params = sampling_params({"max_tokens": None, **settings}, self._llm.built.checkpoint.defaults)
        parser: OutputParser | None = None
        if isinstance(prompt, str):
            request = client.submit(prompt, params, streaming=True)
        else:
            text = self._llm.render_chat(prompt, chat_options())
            parser = self._llm.model_format.parser(tools=(), parallel=True, prompt=text)
            request = client.submit(self._llm.chat_ids(text), params, streaming=True)
        try:
            while not request.finished and not stop.requested:
                for delta in client.step():
                    _show(parser.push(delta.text) if parser else [PlainText(delta.text)], show)
        finally:
            if not request.finished:
                client.abort(request)
        if parser is not None:
            _show(parser.finish(), show)
        output = request.output().outputs[0]
        failure = failure_of(request.sequences[0].finish_reason, len(request.prompt_ids), params)
        return ReplyEnd(output.finish_reason, len(output.token_ids), failure)


def _show(events: Sequence[OutputEvent], show: Callable[[str, bool], None]) -> None:
    for event in events:
        if isinstance(event, PlainText | ReasoningText):
            show(event.text, isinstance(event, ReasoningText))
