"""`quire bench throughput` and `latency` on a tiny model: what they print for people and for programs."""

import json

import pytest

from quire.bench.workload import WorkloadSlice, named_jobs
from quire.cli import bench_processes as race
from quire.core.sampling import SamplingParams
from quire.llm import LLM
from tests.bench.conftest import TINY
from tests.cli.commands import Shell

ENGINE = ("--model", "tiny", "--load-format", "dummy", "--device", "cpu", "--threads", "1", "--kv-cache-memory", "1MiB")
PART = ("--requests", "3", "--scale", "0.01", "--repeats", "2")


def test_throughput_is_told_with_its_circumstances(quire: Shell) -> None:
    said = quire("bench", "throughput", *ENGINE, *PART, "--workload", "nano,exp", "--json")
    assert said.status == 0, said.err
    nano, exp = map(json.loads, said.out.splitlines())
    assert (nano["workload"], nano["seed"], exp["workload"], exp["seed"]) == ("nano", 0, "exp", 2)
    jobs = named_jobs("nano", TINY.vocab_size, part=WorkloadSlice(3, 0.01))
    assert nano["requests"] == 3
    assert nano["input_tokens"] == sum(len(job.prompt) for job in jobs)
    assert nano["output_tokens"] == sum(job.num_output for job in jobs)
    assert nano["output_tokens_per_s"] == nano["output_tokens"] / nano["seconds"]
    assert len(nano["repeats"]) == 2
    first, second = (repeat["seconds"] for repeat in nano["repeats"])
    assert nano["seconds"] == (first + second) / 2
    assert not nano["whole"], "a part is never taken for the workload"
    assert nano["settings"]["regime"] == "chunked", "the prefix cache is off"
    assert nano["repeats"][0]["gpu_busy"] is None and "the device is the CPU" in nano["repeats"][0]["gpu_busy_note"]
    assert nano["command"].startswith("quire bench throughput --model tiny")
    assert {"quire", "torch", "python", "numpy"} <= nano["versions"].keys()
    assert nano["machine"]["device"] == "cpu"


def test_what_was_measured_before_something_failed_is_told(quire: Shell) -> None:
    said = quire("bench", "throughput", *ENGINE, "--repeats", "1", "--workload", "2x8+2,1x100000+2")
    assert said.status == 2 and "this engine's context is 256" in said.err
    assert "2x8+2" in said.out, "the table holds the workloads that came to their end"


@pytest.mark.parametrize("verb", ["throughput", "latency"])
def test_tokens_may_be_drawn(quire: Shell, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[SamplingParams] = []
    generate = LLM.generate

    def listening(self: LLM, prompts, params, **others):
        asked.extend(params)
        return generate(self, prompts, params, **others)

    monkeypatch.setattr(LLM, "generate", listening)
    drawn = ("--temperature", "0.6", "--top-p", "0.9", "--top-k", "20", "--repetition-penalty", "1.1")
    drawn += ("--logprobs", "2", "--prompt-logprobs", "1")
    said = quire("bench", verb, *ENGINE, "--repeats", "1", "--workload", "3x8+4", *drawn, "--json")
    assert said.status == 0, said.err
    wanted = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    wanted |= {"logprobs": 2, "prompt_logprobs": 1}
    assert json.loads(said.out)["sampling"] == wanted
    assert asked == [SamplingParams(**wanted, max_tokens=4, ignore_eos=True)] * 6, "of the warm-up, and of the repeat"


def test_the_prefix_cache_is_empty_before_each_repeat(quire: Shell) -> None:
    said = quire("bench", "throughput", *ENGINE, "--block-size", "4", *PART, "--prefix-cache", "--json")
    told = json.loads(said.out)
    assert told["settings"]["regime"] == "prefix"
    assert [repeat["cached_tokens"] for repeat in told["repeats"]] == [0, 0]


def test_latency_is_derived_from_its_steps(quire: Shell) -> None:
    said = quire("bench", "latency", *ENGINE, "--scale", "0.05", "--repeats", "1", "--workload", "bs8", "--json")
    assert said.status == 0, said.err
    told = json.loads(said.out)
    assert (told["requests"], told["input_tokens"], told["output_tokens"]) == (8, 8 * 52, 8 * 7)
    [repeat] = told["repeats"]
    assert sum(each["prompt_tokens"] for each in repeat["steps"]) == 8 * 52
    assert sum(each["output_tokens"] for each in repeat["steps"]) == 8 * 7
    done = [each["done_s"] for each in repeat["steps"]]
    assert done == sorted(done)
    assert told["gap_ms"]["p50"] <= told["gap_ms"]["p90"] <= told["gap_ms"]["p99"] <= told["gap_ms"]["max"]
    assert len(repeat["first_token_s"]) == 8
    assert told["ms_per_token"] == 1000 * told["seconds"] / 7


def test_a_prefill_has_a_first_token_and_no_gaps(quire: Shell) -> None:
    said = quire("bench", "latency", *ENGINE, "--scale", "0.01", "--repeats", "1", "--workload", "prefill8k", "--json")
    told = json.loads(said.out)
    assert (told["input_tokens"], told["output_tokens"], told["gap_ms"]) == (82, 1, None)
    assert told["first_token_ms"]["p50"] > 0


def test_tables_say_that_a_part_is_a_trial(quire: Shell) -> None:
    said = quire("bench", "throughput", *ENGINE, *PART)
    assert "nano" in said.out and "a trial" in said.out and "the device is the CPU" in said.out
    assert "· greedy ·" in said.out
    said = quire("bench", "throughput", *ENGINE, *PART, "--temperature", "0.6", "--top-k", "20")
    assert "· temperature 0.6, top_k 20 ·" in said.out, said.err
    said = quire("bench", "latency", *ENGINE, "--scale", "0.01", "--repeats", "1", "--workload", "bs8,prefill2k")
    assert "bs8" in said.out and "prefill2k" in said.out, said.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("throughput", "--workload", "nono"), "there is no workload 'nono' here; there are nano, 1k1k, exp, bs8"),
        (("latency", "--workload", "5x10"), "any other is written as COUNTxIN+OUT, such as 64x4096+16"),
        (("throughput", "--workload", "nano,5x10..3+1"), "prompts of 10..3 tokens; the smaller number comes first"),
        (("throughput", "--workload", "bs1"), "bs8, bs64, bs256"),
        (("throughput", "--top-p", "1.5"), "top_p"),
        (("latency", "--workload", "bs8,nano"), "there are bs1, bs8, bs64, bs256, prefill2k, prefill8k"),
        (("throughput", "--model", "qwen-0.6b", "--load-format", "dummy"), "there are llama-3.1-8b"),
        (("race", "--rival", "true", "--", "startup"), "after -- comes throughput or latency"),
    ],
)
def test_wrong_names_get_the_right_ones(quire: Shell, arguments: tuple[str, ...], words: str) -> None:
    said = quire("bench", *arguments)
    assert said.status == 2
    assert words in said.err


@pytest.mark.parametrize("verb", ["throughput", "latency"])
def test_a_shape_is_told_as_it_was_written(quire: Shell, verb: str) -> None:
    said = quire("bench", verb, *ENGINE, "--repeats", "1", "--workload", "3x8..16+02..5", "--json")
    assert said.status == 0, said.err
    told = json.loads(said.out)
    jobs = named_jobs("3x8..16+2..5", TINY.vocab_size)
    assert (told["workload"], told["seed"], told["requests"], told["whole"]) == ("3x8..16+02..5", 1, 3, True)
    assert told["input_tokens"] == sum(len(job.prompt) for job in jobs)
    assert told["output_tokens"] == sum(job.num_output for job in jobs)


def test_a_workload_beyond_the_context_is_refused_before_its_warm_up(quire: Shell) -> None:
    said = quire("bench", "throughput", *ENGINE, "--workload", "2x200+57")
    assert said.status == 2 and "2x200+57: warm-up" not in said.err
    assert "2x200+57 has a request of 200 tokens in and 57 out, 257 in all" in said.err
    assert "this engine's context is 256. Use --max-model-len 257" in said.err


def test_a_race_hands_our_workload_on(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[list[str]] = []
    monkeypatch.setattr(race, "race", lambda ours, *others: handed.append(ours))
    said = quire("bench", "race", "--rival", "true", "--", "throughput", "--workload", "nano,5x3..9+4")
    assert said.status == 0, said.err
    assert handed[0][2:] == ["quire", "bench", "throughput", "--workload", "nano,5x3..9+4", "--json"]
