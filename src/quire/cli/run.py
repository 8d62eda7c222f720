"""`quire run`: one prompt, its text on stdout as it comes."""

import sys
from collections.abc import Mapping

from quire.cli.console import err
from quire.cli.options import sampling_params
from quire.cli.reply import say
from quire.cli.start import start
from quire.formats.checkpoint import GenerationDefaults
from quire.llm import LLM

_INTERRUPTED = 130  # what shells expect after Ctrl-C


def run(model: str | None, prompt: str, given: Mapping[str, object]) -> int:
    """The exit status."""
    sampling_params(given, GenerationDefaults())  # refuses a bad parameter before a model is loaded for nothing
    text = _from_stdin() if prompt == "-" else prompt
    llm = LLM.over(start(model, given, report=bool(given["verbose"])))
    params = sampling_params(given, llm.built.checkpoint.defaults)
    reply = say(llm, llm.chat_prompt([{"role": "user", "content": text}]) if given["chat"] else text, params)
    print()
    if given["verbose"]:
        speed = reply.num_tokens / max(reply.seconds, 1e-9)
        err.print(f"{reply.num_tokens} tokens · {speed:.1f} tok/s · {reply.finish_reason}", style="dim")
    if reply.failure is not None:
        raise reply.failure
    return _INTERRUPTED if reply.finish_reason == "abort" else 0


def _from_stdin() -> str:
    if sys.stdin.isatty():
        err.print("Type the prompt; Ctrl-D on an empty line ends it.", style="dim")
    return sys.stdin.read()
