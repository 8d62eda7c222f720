"""`quire chat`: a conversation in the terminal. Ctrl-C stops the reply, not the program."""

import sys
from collections.abc import Mapping
from contextlib import suppress

from quire.cli.console import err
from quire.cli.options import sampling_params
from quire.cli.reply import say
from quire.cli.start import start
from quire.core.errors import ContextLengthExceeded, NeverFits, QuireError
from quire.core.sampling import SamplingParams
from quire.formats.checkpoint import GenerationDefaults
from quire.llm import LLM

HELP = """\
  /help          this list
  /system TEXT   set the system message and start over (no TEXT: none)
  /clear         forget the conversation
  /undo          forget the last question and its answer
  /quit          leave (or Ctrl-D)
Ctrl-C stops a reply. End a line with \\ to go on in the next one."""


class Conversation:
    """The messages so far."""

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
        """Whether there was a question to forget."""
        while self._messages and self._messages[-1]["role"] != "system":
            if self._messages.pop()["role"] == "user":
                return True
        return False

    def ask(self, text: str) -> None:
        """Print the reply as it comes. What was said before an interruption stays in the conversation."""
        self._messages.append({"role": "user", "content": text})
        try:
            reply = say(self._llm, self._llm.chat_prompt(self._messages), self._params)
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


def chat(model: str | None, given: Mapping[str, object]) -> None:
    sampling_params(given, GenerationDefaults())  # refuses a bad parameter before a model is loaded for nothing
    llm = LLM.over(start(model, given, report=True))
    llm.chat_prompt([{"role": "user", "content": "hi"}])  # a model that cannot chat says so now
    params = sampling_params(given, llm.built.checkpoint.defaults)
    system = given["system"]
    conversation = Conversation(llm, params, None if system is None else str(system))
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


def _handle(line: str, conversation: Conversation) -> None:
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
    """One message; a line that ends in a backslash goes on."""
    prompt = "› " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    line = input(prompt)
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input("… " if prompt else "")
    return line.strip()
