"""`quire run`: one prompt, its text on stdout as it comes."""

import sys
from collections.abc import Mapping

from quire.cli.console import err
from quire.cli.options import sampling_params
from quire.cli.start import start
from quire.llm import LLM


def run(model: str | None, prompt: str, given: Mapping[str, object]) -> None:
    text = sys.stdin.read() if prompt == "-" else prompt
    llm = LLM.over(start(model, given, report=bool(given["verbose"])))
    params = sampling_params(given, llm.get_default_sampling_params(), int(str(given["max_tokens"])))
    if given["chat"]:
        deltas = llm.stream_chat([{"role": "user", "content": text}], params)
    else:
        deltas = llm.stream(text, params)
    num_tokens = 0
    started_s = llm.front.now()
    try:
        for delta in deltas:
            num_tokens += len(delta.token_ids)
            print(delta.text, end="", flush=True)
    except KeyboardInterrupt:
        print()
        raise SystemExit(130) from None
    print()
    if given["verbose"]:
        seconds = llm.front.now() - started_s
        err.print(f"{num_tokens} tokens · {num_tokens / max(seconds, 1e-9):.1f} tok/s", style="dim")
