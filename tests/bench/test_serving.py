"""`quire bench serve`: the real server, the engine alone and the client, each its own process; what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench.serving import ServingLoad, ServingRepeat, median_ratio
from tests import children
from tests.llm.tiny import tiny_llama, write_model


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "bench", "serve", *arguments]
    return children.run(command, capture_output=True, text=True, timeout=120)


def test_both_ways_compute_the_same_streams_and_everybody_tells_what_it_cost(tmp_path: Path) -> None:
    write_model(tmp_path, tiny_llama())
    options = ("--streams", "2", "--output-tokens", "5", "--repeats", "1", "--threads", "1", "--json")
    done = bench("--model", str(tmp_path), *options)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    [repeat] = told["repeats"]
    assert (told["num_streams"], told["num_output"], told["threads"]) == (2, 5, 1)
    assert repeat["ratio"] == told["median_ratio"] == repeat["alone_s"] / repeat["http_s"]
    assert repeat["client_cpu_s"] > 0 and repeat["alone_cpu_s"] > 0
    assert repeat["front_cpu_s"] >= 0 and repeat["engine_cpu_s"] >= 0  # in ticks of the kernel's clock


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--streams", "0"), "--streams"),
        (("--output-tokens", "many"), "--output-tokens"),
        (("--repeats", "-1"), "--repeats"),
        (("--model", "nowhere/at-all.gguf"), "nowhere/at-all.gguf"),
    ],
)
def test_nonsense_is_named(arguments: tuple[str, ...], words: str) -> None:
    done = bench(*arguments)
    assert done.returncode != 0
    assert words in done.stderr and "Traceback" not in done.stderr


def test_no_prompt_comes_twice() -> None:
    load = ServingLoad(None, 64, 8, None)
    assert len({*load.prompts(1), *load.prompts(2)}) == 128


def test_the_middle_repeat_counts() -> None:
    repeats = [ServingRepeat(alone_s, 2.0, 0, 0, 0, 0) for alone_s in (1.0, 1.8, 9.0)]
    assert median_ratio(repeats) == 0.9
