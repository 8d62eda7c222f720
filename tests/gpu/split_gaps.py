"""Gaps between the tokens of chats on a decode engine while a prefill engine on the same GPU computes long prompts.

    nvidia-cuda-mps-control -d     # otherwise the GPU's time is divided between the engines
    python -m tests.gpu.split_gaps [--intervals 0.4,0.6] SETTING ...

A setting is of the prefill engine: `priority=1,percentage=75,step=2048`, or `plain`. `priority` and `percentage` are
MPS's client priority (1: below normal) and its share of the multiprocessors; `step` is --max-num-batched-tokens;
`single`: no prompt is split. Each setting has two new engines with random weights. A line of JSON for no prompts and
for each interval between prompts.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from time import monotonic

import numpy as np

from quire.config import EngineConfig
from quire.core.sampling import SamplingParams
from quire.engine.engine_process import EngineProcess
from quire.engine.open_model import open_model
from quire.engine.outputs import RequestOutput
from quire.engine.prefix_transfer import EngineRole
from quire.engine.wire import ToFront
from quire.server.engine_supervisor import Supervisor
from quire.server.request_stream import RequestStream
from tests.server.supervision import until, watched
from tests.server.test_prefill_decode import Split

NUM_CHATS, WARM_UP_S = 16, 2.0
VARIABLES = {"priority": "CUDA_MPS_CLIENT_PRIORITY", "percentage": "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}


@contextmanager
def variables(setting: dict[str, str]) -> Iterator[None]:
    """Of the processes that are started meanwhile."""
    chosen = {name: setting[key] for key, name in VARIABLES.items() if key in setting}
    os.environ.update(chosen)
    try:
        yield
    finally:
        for name in chosen:
            del os.environ[name]


class Gaps:
    """Chats, and the prompts beside them."""

    def __init__(self, split: Split, num_prompt: int, seed: int, trace: bool) -> None:
        self.split = split
        self.num_prompt = num_prompt
        self.random = np.random.default_rng(seed)
        self.arrivals: list[list[float]] = []
        self.first_tokens_s: list[float] = []
        self.ends_s: list[float] = []
        self.trace = trace

    def submit(self, num_prompt: int, max_tokens: int) -> RequestStream:
        prompt = self.random.integers(10, 40_000, num_prompt).tolist()
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return self.split.engine.submit(prompt, params, streaming=True)

    async def chat(self) -> None:
        stream = self.submit(90, 4_000)
        times: list[float] = []
        self.arrivals.append(times)
        try:
            while not isinstance(await stream.receive(), RequestOutput):
                times.append(monotonic())
        finally:
            stream.close()

    async def prompt(self) -> None:
        began_s = monotonic()
        stream = self.submit(self.num_prompt, 1)
        try:
            await stream.receive()
            self.ends_s.append(monotonic())
            self.first_tokens_s.append(self.ends_s[-1] - began_s)
        finally:
            stream.close()

    async def measure(self, interval_s: float | None, seconds: float) -> dict[str, object]:
        """What arrives after the first two seconds."""
        self.arrivals.clear()
        self.first_tokens_s.clear()
        self.ends_s.clear()
        tasks = [asyncio.ensure_future(self.chat()) for _ in range(NUM_CHATS)]
        began_s = monotonic()
        await asyncio.sleep(0.5)
        while (now_s := monotonic()) < began_s + WARM_UP_S + seconds:
            if interval_s is not None:
                tasks.append(asyncio.ensure_future(self.prompt()))
            await asyncio.sleep(interval_s or seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        since_s = began_s + WARM_UP_S
        gaps = [1e3 * (b - a) for times in self.arrivals for a, b in pairwise(times) if since_s < a and b < now_s]
        p50, p90, p99 = (round(float(value), 2) for value in np.percentile(gaps, (50, 90, 99)))
        if self.trace:
            slow = [(a, 1e3 * (b - a)) for a, b in pairwise(self.arrivals[0]) if since_s < a and b - a > 1.1e-3 * p50]
            nearest = [min((a - end for end in self.ends_s), key=abs, default=0.0) for a, _ in slow]
            print([(round(1e3 * at), round(ms, 1)) for at, (_, ms) in zip(nearest, slow, strict=True)])
        first = sorted(self.first_tokens_s)
        failed = sum(each.failure is not None for each in self.split.ends)
        return {
            "interval_s": interval_s, "itl_p50_ms": p50, "p90": p90, "p99": p99, "ratio": round(p99 / p50, 3),
            "gaps": len(gaps), "prompts": len(first), "not_copied": failed,
            "ttft_p50_ms": round(1e3 * first[len(first) // 2]) if first else None,
        }  # fmt: skip


async def run(setting: dict[str, str], given: argparse.Namespace, config: EngineConfig) -> None:
    split = Split(open_model(config), config, None)
    step = int(setting.get("step", config.max_num_batched_tokens or 8192))
    [prefill] = split.split.engines

    def launch(receive: Callable[[ToFront], None], end: Callable[[], None]) -> EngineProcess:
        with variables(setting):
            return EngineProcess(receive, end)

    computing = replace(config, max_num_batched_tokens=step)
    split.supervisor.prefill = [
        Supervisor(computing, None, prefill, clock=monotonic, serving=False, role=EngineRole.PREFILL, launch=launch)
    ]
    split.split.is_ready = lambda rank: "single" not in setting
    async with watched(split.supervisor):
        await until(lambda: all(each.costs.known for each in (*split.engine.engines, *split.split.engines)))
        gaps = Gaps(split, given.prompt, 1, given.trace)
        await gaps.measure(0.5, 1.0)  # kernels and shapes are seen once
        await asyncio.sleep(3.0)
        for interval_s in [None, *map(float, given.intervals.split(","))]:
            split.ends.clear()
            print(json.dumps({"setting": setting} | await gaps.measure(interval_s, given.seconds)), flush=True)
            await asyncio.sleep(1.0)


def read_setting(text: str) -> dict[str, str]:
    if text == "plain":
        return {}
    return dict((*pair.split("="), "")[:2] for pair in text.split(","))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="+", type=read_setting)
    parser.add_argument("--intervals", default="0.4,0.6")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--prompt", type=int, default=8000)
    parser.add_argument("--load-format", default="dummy")
    parser.add_argument("--max-model-len", type=int, default=32_768)
    parser.add_argument("--trace", action="store_true", help="Long gaps of one chat, and ms since the nearest prompt.")
    parser.add_argument("--kv-gib", type=int, default=20)
    given = parser.parse_args()
    config = EngineConfig(
        model=given.model,
        load_format=given.load_format,
        max_model_len=given.max_model_len,
        kv_cache_memory=given.kv_gib << 30,
        max_num_seqs=64,
    )
    for setting in given.settings:
        asyncio.run(run(setting, given, config))


if __name__ == "__main__":
    main()
