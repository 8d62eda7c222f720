"""An engine in each process of a pool, with its share of the cores: `python examples/multiprocess.py [PROCESSES]`."""

import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from quire import LLM, SamplingParams

TEXTS = ("Rain is", "Snow is", "Wind is", "Fog is")
llm: LLM | None = None


def load(threads: int) -> None:
    """In each process, once."""
    global llm
    llm = LLM(max_model_len="1k", threads=threads, kv_cache_memory="64MiB")


def complete(text: str) -> str:
    assert llm is not None
    (output,) = llm.generate(text, SamplingParams(temperature=0, max_tokens=8))
    return f"{text}{output.outputs[0].text!r} (process {os.getpid()})"


def main() -> None:
    num_processes = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    threads = max((os.cpu_count() or 1) // num_processes, 1)
    context = get_context("spawn")  # a forked process could not use torch
    with ProcessPoolExecutor(num_processes, mp_context=context, initializer=load, initargs=(threads,)) as pool:
        for line in pool.map(complete, TEXTS):
            print(line)


if __name__ == "__main__":
    main()
