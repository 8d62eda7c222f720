"""`quire chat`: a conversation in the terminal. `quire run`: one prompt, its completion on stdout.

A reply is streamed. Ctrl-C ends it between two engine steps, never inside one, so that the engine stays consistent; it
ends the reply of a chat, not the program.
"""

import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple

from quire.cli.console import err
from quire.cli.load_model import NamedModel, start
from quire.cli.options import sampling_params
from quire.core.errors import ContextLengthExceeded, NeverFits, QuireError
from quire.core.sampling import SamplingParams
from quire.engine.output_processor import Prompt
from quire.engine.outputs import failure_of
from quire.llm import LLM
from quire.text.tokenizer import check_text


class PrintedReply(NamedTuple):
    """The text of a reply, its finish reason ("stop", "length", or "abort" after Ctrl-C), or its failure."""

    text: str
    finish_reason: str | None
    num_tokens: int
    seconds: float
    failure: QuireError | None = None


@dataclass(slots=True)
class StopRequest:
    """Whether the user has requested the end of the reply."""

    requested: bool = False


@contextmanager
def _stop_on_interrupt() -> Iterator[StopRequest]:
    """The first Ctrl-C requests a stop. A second one, during a long step, raises KeyboardInterrupt."""
    stop = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


def print_reply(llm: LLM, prompt: Prompt, params: SamplingParams) -> PrintedReply:
    """Print a completion as it is generated and return it."""
    client = llm.client
    started_s = client.now()
    with _stop_on_interrupt() as stop:
        request = client.submit(prompt, params, streaming=True)
        try:
            while not request.finished and not stop.requested:
                for delta in client.step():
                    print(delta.text, end="", flush=True)
        finally:
            if not request.finished:
                client.abort(request)
    output = request.output().outputs[0]
    failure = failure_of(request.sequences[0].finish_reason, len(request.prompt_ids), params)
    return PrintedReply(output.text, output.finish_reason, len(output.token_ids), client.now() - started_s, failure)


HELP = """\
  /help          this list
  /system TEXT   set the system message and start over (no TEXT: none)
  /clear         forget the conversation
  /undo          forget the last question and its answer
  /quit          leave (or Ctrl-D)
Ctrl-C stops a reply. End a line with \\ to go on in the next one."""


class ChatSession:
    """The messages of a conversation."""

    def __init__(self, llm: LLM, params: SamplingParams, system: str | None) -> None:
        self._llm = llm
        self._params = params
        self._system = system
        self._messages: list[dict[str, object]] = []
        self.clear()

    def clear(self) -> None:
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def set_system(self, text: str) -> None:
        self._system = text or None
        self.clear()

    def undo(self) -> bool:
        """Remove the last question and its reply; whether there was one."""
        while self._messages and self._messages[-1]["role"] != "system":
            if self._messages.pop()["role"] == "user":
                return True
        return False

    def ask(self, text: str) -> None:
        """Print the reply as it is generated. The text before an interruption stays in the conversation."""
        self._messages.append({"role": "user", "content": text})
        try:
            reply = print_reply(self._llm, self._llm.chat_prompt(self._messages), self._params)
        except QuireError as error:
            self._messages.pop()
            err.print(error.message, style="red")
            if isinstance(error, ContextLengthExceeded | NeverFits):
                err.print("/clear or /undo makes room in the conversation.", style="dim")
            return
        print()
        if reply.finish_reason == "length":
            err.print("(cut off: the context or --max-tokens is used up; /clear makes room)", style="dim")
        elif reply.finish_reason == "abort":
            err.print("(stopped)", style="dim")
        print(flush=True)
        if reply.text:
            self._messages.append({"role": "assistant", "content": reply.text})
        else:
            self._messages.pop()


def chat(model: NamedModel, given: Mapping[str, object]) -> None:
    llm = LLM.over(start(model, report=True))
    llm.chat_prompt([{"role": "user", "content": "hi"}])  # a model without a chat template is refused now
    params = sampling_params(given, llm.built.checkpoint.defaults)
    system = given["system"]
    conversation = ChatSession(llm, params, None if system is None else str(system))
    with suppress(ImportError):
        import readline  # noqa: F401  # line editing and history for input()
    err.print("Type a message, or /help. Ctrl-D leaves.", style="dim")
    while True:
        try:
            line = _read()
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            err.print("Ctrl-D or /quit leaves.", style="dim")
            continue
        if line in ("/quit", "/exit"):
            return
        _handle(line, conversation)


def _handle(line: str, conversation: ChatSession) -> None:
    command, _, rest = line.partition(" ")
    if not line:
        return
    if command == "/help":
        err.print(HELP)
    elif command == "/clear":
        conversation.clear()
        err.print("Forgotten.", style="dim")
    elif command == "/undo":
        forgotten = conversation.undo()
        err.print("The last question is forgotten." if forgotten else "There is nothing to forget.", style="dim")
    elif command == "/system":
        conversation.set_system(rest.strip())
        err.print("A new conversation begins.", style="dim")
    elif command.startswith("/"):
        err.print(f"There is no {command}; /help lists what there is.", style="red")
    else:
        conversation.ask(line)


def _read() -> str:
    """One message. A line that ends in a backslash continues in the next one."""
    prompt = "› " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    line = input(prompt)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("… " if prompt else "")
    return line.strip()


_INTERRUPTED = 130  # the status that shells expect after Ctrl-C


def run(model: NamedModel, prompt: str, given: Mapping[str, object]) -> int:
    """The exit status."""
    text = _from_stdin() if prompt == "-" else prompt
    check_text(text)
    llm = LLM.over(start(model, report=bool(given["verbose"])))
    params = sampling_params(given, llm.built.checkpoint.defaults)
    reply = print_reply(llm, llm.chat_prompt([{"role": "user", "content": text}]) if given["chat"] else text, params)
    print()
    if given["verbose"]:
        speed = reply.num_tokens / max(reply.seconds, 1e-9)
        err.print(f"{reply.num_tokens} tokens · {speed:.1f} tok/s · {reply.finish_reason}", style="dim")
    if reply.failure is not None:
        raise reply.failure
    if not reply.text.strip() and reply.finish_reason == "stop" and not given["chat"]:
        err.print("The model ended the text at once. To ask it a question, use quire run --chat.", style="dim")
    return _INTERRUPTED if reply.finish_reason == "abort" else 0


def _from_stdin() -> str:
    if sys.stdin.isatty():
        err.print("Type the prompt; Ctrl-D on an empty line ends it.", style="dim")
    return sys.stdin.read()
