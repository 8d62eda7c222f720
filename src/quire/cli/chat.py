"""`quire chat`: a conversation in the terminal, with a model here or on a server. `quire run`: one prompt.

The lines that are typed, and what each command does. Imports no torch.
"""

import re
import sys
from collections.abc import Mapping
from contextlib import suppress

from quire.cli.chat_session import ChatSession, saved_names
from quire.cli.console import err, out
from quire.cli.printed_reply import ReplyModel, print_reply
from quire.core.errors import ConfigError, QuireError
from quire.text.tokenizer import check_text

_INTERRUPTED = 130  # the status that shells expect after Ctrl-C
_QUOTES = '"""'
_COMMAND = re.compile(r"/[a-z?]+")  # a path such as /etc/hosts begins a message
_TOO_LONG = re.compile("context length|KV blocks")

HELP = '''\
  /help              this list
  /system TEXT       set the system message and start over (no TEXT: none)
  /set NAME VALUE    change a sampling setting, as in /set temperature 0.5 (no VALUE: its default; no NAME: list them)
  /model NAME        use another model (no NAME: list them)
  /save NAME         save the conversation; again without NAME: to the same file
  /load NAME         continue a saved conversation (no NAME: list them)
  /clear             forget the conversation
  /undo              forget the last question and its answer
  /quit              leave (or Ctrl-D)
Ctrl-C stops a reply. Several lines: paste them, or put them between """ and """, or end each with \\.'''


class Chat:
    """Reads lines and carries them out, until /quit or the end of the input."""

    def __init__(self, model: ReplyModel, session: ChatSession, *, markdown: bool) -> None:
        self._model = model
        self._session = session
        self._markdown = markdown

    def talk(self) -> None:
        _enable_line_editing()
        err.print("Type a message, or /help. Ctrl-D leaves.", style="dim")
        while True:
            try:
                line = read_message()
                if line in ("/quit", "/exit", "/bye"):
                    return
                self.handle(line)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                err.print("Ctrl-D or /quit leaves.", style="dim")

    def handle(self, line: str) -> None:
        """Carry out a command or send a message. What is wrong is answered in a sentence."""
        command, _, rest = line.partition(" ")
        rest = rest.strip()
        if not line:
            return
        try:
            if not _COMMAND.fullmatch(command) or "\n" in line:
                self.ask(line)
            elif command not in _COMMANDS:
                err.print(f"There is no {command}; /help lists what there is.", style="red")
            else:
                _COMMANDS[command](self, rest)
        except QuireError as error:
            err.print(error.message, style="red")

    def ask(self, text: str) -> None:
        """Print the reply as it is generated. The text before an interruption stays in the conversation."""
        messages = self._session.messages
        messages.append({"role": "user", "content": text})
        answered = False
        try:
            check_text(text)
            reply = print_reply(self._model, messages, self._session.settings, markdown=self._markdown)
            if reply.text:
                messages.append({"role": "assistant", "content": reply.text})
                answered = True
        except QuireError as error:
            err.print(error.message, style="red")
            if _TOO_LONG.search(error.message):
                err.print("/clear or /undo makes room in the conversation.", style="dim")
            return
        finally:
            if not answered:
                messages.pop()
        if reply.text and not self._markdown:
            print()
        if reply.end.failure is not None:
            err.print(reply.end.failure.message, style="red")
        elif not reply.text and reply.end.finish_reason == "stop":
            err.print("(no answer: the model ended it at once; the question is forgotten)", style="dim")
        elif reply.end.finish_reason == "length":
            err.print("(cut off: the context or max_tokens is used up; /clear makes room)", style="dim")
        elif reply.end.finish_reason == "abort":
            err.print("(stopped)", style="dim")
        err.print(reply.speed, style="dim")
        print(flush=True)

    def show_help(self, rest: str) -> None:
        err.print(HELP)

    def clear(self, rest: str) -> None:
        self._session.clear()
        err.print("Forgotten.", style="dim")

    def undo(self, rest: str) -> None:
        forgotten = self._session.undo()
        err.print("The last question is forgotten." if forgotten else "There is nothing to forget.", style="dim")

    def set_system(self, rest: str) -> None:
        self._session.set_system(rest)
        err.print("A new conversation begins.", style="dim")

    def set(self, rest: str) -> None:
        name, _, value = rest.replace("=", " ", 1).partition(" ")
        if name:
            self._session.set(name, value.strip())
        settings = self._session.settings
        shown = " · ".join(f"{name} {value}" for name, value in settings.items()) or "all settings have their defaults"
        err.print(shown, style="dim")

    def choose_model(self, rest: str) -> None:
        if rest:
            self._model.choose(rest)
        names = self._model.names()
        others = [name for name in names if name != self._model.name]
        more = f"; others: {', '.join(others)}" if others else ""
        err.print(f"{self._model.name} answers{more}.", style="dim")

    def save(self, rest: str) -> None:
        if not rest and self._session.path is None:
            err.print("Say under which name: /save NAME.", style="red")
            return
        err.print(f"Saved as {self._session.save(rest, self._model.name)}.", style="dim")

    def load(self, rest: str) -> None:
        if not rest:
            names = saved_names()
            err.print(", ".join(names) or "No chat is saved yet; /save NAME saves one.", style="dim")
            return
        model = self._session.load(rest)
        count = sum(message["role"] == "user" for message in self._session.messages)
        other = "" if model == self._model.name else f" It was with {model}; /model {model} switches."
        err.print(f"Loaded: {count} {'question' if count == 1 else 'questions'}.{other}", style="dim")


_COMMANDS = {
    "/help": Chat.show_help, "/?": Chat.show_help, "/clear": Chat.clear, "/undo": Chat.undo, "/set": Chat.set,
    "/system": Chat.set_system, "/model": Chat.choose_model, "/save": Chat.save, "/load": Chat.load,
}  # fmt: skip


def _enable_line_editing() -> None:
    """Line editing and history for input(). A paste of several lines is one message, which Enter sends."""
    with suppress(ImportError):
        import readline

        if "GNU" in (readline.__doc__ or ""):  # libedit has no bracketed paste
            readline.parse_and_bind("set enable-bracketed-paste on")


def read_message() -> str:
    """One message. Lines between triple quotes are one, and a line that ends in a backslash continues in the next."""
    prompt = "› " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    more = "… " if prompt else ""
    line = input(prompt)
    if line.lstrip().startswith(_QUOTES):
        line = line.lstrip().removeprefix(_QUOTES)
        while _QUOTES not in line:
            line += "\n" + input(more)
        return line.partition(_QUOTES)[0].strip()
    while line.endswith("\\"):
        line = line[:-1] + "\n" + input(more)
    return line.strip()


def chat(model: ReplyModel, given: Mapping[str, object]) -> None:
    system = given["system"]
    session = ChatSession(None if system is None else str(system), given)
    markdown = given["markdown"]
    able = out.is_terminal and not out.is_dumb_terminal
    Chat(model, session, markdown=able if markdown is None else bool(markdown)).talk()


def run(model: ReplyModel, text: str, given: Mapping[str, object]) -> int:
    """The exit status."""
    prompt = [{"role": "user", "content": text}] if given["chat"] else text
    reply = print_reply(model, prompt, ChatSession(None, given).settings)
    print()
    end = reply.end
    if given["verbose"]:
        err.print(f"{reply.speed} · {end.finish_reason}", style="dim")
    if end.failure is not None:
        raise end.failure
    if not given["chat"]:
        if not reply.text.strip() and end.finish_reason == "stop":
            err.print("The model ended the text at once. To ask it a question, use quire run --chat.", style="dim")
        elif text.rstrip().endswith("?"):
            err.print("(The text was continued. To ask the model a question, use quire run --chat.)", style="dim")
    return _INTERRUPTED if end.finish_reason == "abort" else 0


def read_prompt(prompt: str) -> str:
    """The prompt of `quire run`; - is stdin."""
    if prompt == "-":
        if sys.stdin.isatty():
            err.print("Type the prompt; Ctrl-D on an empty line ends it.", style="dim")
        prompt = sys.stdin.read()
    if not prompt:
        raise ConfigError("The prompt is empty; it needs at least one token.", param="prompt")
    check_text(prompt)
    return prompt
