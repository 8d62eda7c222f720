"""`quire bench overhead`: the real server, the engine alone and the client, a process each; refused options."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench.serving import ServingLoad, ServingRepeat, median_ratio
from tests import children
from tests.llm.tiny import tiny_llama, write_model
from tests.tiers import long_only


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", "bench", "overhead", *arguments]
    return children.run(command, capture_output=True, text=True, timeout=120)


@pytest.mark.long  # three processes that compile kernels: 51 CPU seconds
def test_both_runs_generate_the_same_tokens_and_report_cpu_times(tmp_path: Path) -> None:
    write_model(tmp_path, tiny_llama())
    options = ("--streams", "2", "--output-tokens", "5", "--repeats", "1", "--threads", "1", "--json")
    done = bench("--model", str(tmp_path), *options)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    [repeat] = report["repeats"]
    assert (report["num_streams"], report["num_output"], report["threads"]) == (2, 5, 1)
    assert repeat["ratio"] == report["median_ratio"] == repeat["alone_s"] / repeat["http_s"]
    assert repeat["client_cpu_s"] > 0 and repeat["alone_cpu_s"] > 0
    assert repeat["front_cpu_s"] >= 0 and repeat["engine_cpu_s"] >= 0  # in ticks of the kernel's clock


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--streams", "0"), "--streams"),
        (("--output-tokens", "many"), "--output-tokens"),
        (("--repeats", "-1"), "--repeats"),
        *long_only([(("--model", "nowhere/at-all.gguf"), "nowhere/at-all.gguf")]),  # starts two engines
    ],
)
def test_invalid_options_are_named(arguments: tuple[str, ...], words: str) -> None:
    done = bench(*arguments)
    assert done.returncode != 0
    assert words in done.stderr and "Traceback" not in done.stderr


def test_no_prompt_is_used_twice() -> None:
    load = ServingLoad(None, 64, 8, None)
    assert len({*load.prompts(1), *load.prompts(2)}) == 128


def test_the_ratio_is_the_median_of_the_repeats() -> None:
    repeats = [ServingRepeat(alone_s, 2.0, 0, 0, 0, 0) for alone_s in (1.0, 1.8, 9.0)]
    assert median_ratio(repeats) == 0.9
