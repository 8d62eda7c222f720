"""A reply in the terminal, as it is generated: markdown where stdout is a terminal, else the text itself.

Ctrl-C ends the reply, not the program. Does not depend on where the model runs.
"""

import re
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import NamedTuple, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment

from quire.cli.console import err, out
from quire.core.errors import QuireError

Conversation = Sequence[Mapping[str, object]]
_REFRESH_S = 0.05
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
# Characters that control a terminal: a model must not set its title, its colours or its clipboard.
_CONTROLS = dict.fromkeys({*range(32), *range(127, 160)} - {ord("\n"), ord("\t")})


@dataclass(slots=True)
class StopRequest:
    """Whether the user has requested the end of the reply, and what ends a wait for more of it."""

    requested: bool = False
    interrupt: Callable[[], None] | None = None


@contextmanager
def stop_on_interrupt() -> Iterator[StopRequest]:
    """The first Ctrl-C requests a stop. A second one, during a long step, raises KeyboardInterrupt."""
    stop = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        stop.requested = True
        signal.signal(signal.SIGINT, before)
        if stop.interrupt is not None:
            stop.interrupt()

    before = signal.signal(signal.SIGINT, note)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def without_echo() -> Iterator[None]:
    """What is typed meanwhile does not appear, and is read afterwards: ^C would move the text that is redrawn."""
    if not sys.stdin.isatty():
        yield
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    flags = before.copy()
    flags[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, flags)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)


class ReplyEnd(NamedTuple):
    """How a reply ended: "stop", "length", or "abort" after Ctrl-C; or with a failure."""

    finish_reason: str | None
    num_tokens: int
    failure: QuireError | None = None


class ReplyModel(Protocol):
    """A model that answers, here or on a server."""

    @property
    def name(self) -> str: ...

    def reply(
        self,
        prompt: str | Conversation,
        settings: Mapping[str, object],
        show: Callable[[str, bool], None],
        stop: StopRequest,
    ) -> ReplyEnd:
        """Complete a text or answer a conversation. `show` is called with each piece, and whether it is reasoning."""
        ...

    def names(self) -> Sequence[str]:
        """The models that can be chosen."""
        ...

    def choose(self, name: str) -> None:
        """Use another model from now on."""
        ...


class PrintedReply(NamedTuple):
    """The text of a reply, without its reasoning, and its figures."""

    text: str
    end: ReplyEnd
    seconds: float
    first_s: float | None  # to the first piece

    @property
    def speed(self) -> str:
        """Tokens, tokens per second after the first, and the time to the first."""
        count = self.end.num_tokens
        words = [f"{count} {'token' if count == 1 else 'tokens'}"]
        if self.first_s is not None:
            decode_s = self.seconds - self.first_s
            if count > 1 and decode_s > 0:
                words.append(f"{(count - 1) / decode_s:.1f} tok/s")
            words.append(f"first token {1000 * self.first_s:.0f} ms")
        return " · ".join(words)


def print_reply(
    model: ReplyModel, prompt: str | Conversation, settings: Mapping[str, object], *, markdown: bool = False
) -> PrintedReply:
    """Print a reply as it is generated and return it."""
    printer = MarkdownStream(out) if markdown else TextStream(out)
    parts: list[str] = []
    first_s: float | None = None
    started_s = time.monotonic()

    def show(text: str, is_reasoning: bool) -> None:
        nonlocal first_s
        if not text:
            return
        if first_s is None:
            first_s = time.monotonic() - started_s
        if is_reasoning:
            printer.show_reasoning(text)
        else:
            parts.append(text)
            printer.show(text)

    try:
        with without_echo() if markdown else nullcontext(), stop_on_interrupt() as stop:
            end = model.reply(prompt, settings, show, stop)
    finally:
        seconds = time.monotonic() - started_s
        printer.close()
    return PrintedReply("".join(parts), end, seconds, first_s)


class TextStream:
    """Prints text as it comes. On a terminal without the characters that control it; reasoning goes to stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._reasons = False

    def show_reasoning(self, text: str) -> None:
        self._reasons = True
        err.print(text.translate(_CONTROLS), end="", style="dim", soft_wrap=True)

    def show(self, text: str) -> None:
        if self._reasons:
            self._reasons = False
            err.print("\n")
        print(text.translate(_CONTROLS) if self._console.is_terminal else text, end="", flush=True)

    def close(self) -> None:
        if self._reasons:
            err.print()


class MarkdownStream(TextStream):
    """Prints each block of markdown once it is complete, and the block that is being written below it, redrawn."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._rest = ""
        self._printed = False
        self._drawn_s = 0.0
        self._live: Live | None = None

    def show(self, text: str) -> None:
        if self._live is None:
            super().show("")  # ends the reasoning
            self._live = Live(console=self._console, auto_refresh=False, transient=True, vertical_overflow="visible")
            self._live.start()
        *complete, self._rest = split_blocks(self._rest + text.translate(_CONTROLS))
        if complete:
            self._live.update("")
        for block in complete:
            self._print(block)
        if complete or time.monotonic() - self._drawn_s > _REFRESH_S:
            self._live.update(_Block(self._rest, self._console.height - 2), refresh=True)
            self._drawn_s = time.monotonic()

    def close(self) -> None:
        super().close()
        if self._live is not None:
            self._live.stop()
            self._print(self._rest)

    def _print(self, block: str) -> None:
        if not block.strip():
            return
        if self._printed:
            self._console.print()
        self._printed = True
        self._console.print(_Block(block))


class _Block:
    """A block without empty lines around it; of one that may be longer than the terminal, the last lines."""

    def __init__(self, text: str, num_lines: int | None = None) -> None:
        self._text = text
        self._num_lines = num_lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(render_markdown(self._text), options, pad=False)
        full = [number for number, line in enumerate(lines) if any(segment.text.strip() for segment in line)]
        lines = lines[full[0] : full[-1] + 1] if full else []
        for line in lines if self._num_lines is None else lines[-max(self._num_lines, 1) :]:
            yield from line
            yield Segment.line()


def render_markdown(text: str) -> Markdown:
    """Markdown in which addresses of links are visible and HTML is text."""
    rendered = Markdown(text, hyperlinks=False)
    for token in rendered.parsed:
        if token.type == "html_block":
            token.type, token.tag, token.info = "fence", "code", "html"
        for child in token.children or ():
            if child.type == "html_inline":
                child.type = "text"
    return rendered


def split_blocks(text: str) -> list[str]:
    """The blocks of a markdown text. All but the last are complete.

    A block ends where a line that is not indented follows an empty one outside of fenced code.
    """
    blocks = [""]
    fence: str | None = None
    after_empty = False
    for line in text.splitlines(keepends=True):
        mark = _FENCE.match(line)
        if fence is None and after_empty and line[0] not in " \t\r\n":
            blocks.append("")
        if mark is not None and fence is None:
            fence = mark[1]
        elif mark is not None and fence is not None and mark[1].startswith(fence) and not line[mark.end() :].strip():
            fence = None
        after_empty = not line.strip()
        blocks[-1] += line
    return blocks
