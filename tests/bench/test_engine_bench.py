"""`quire bench throughput` and `latency` on a tiny model: their output as tables and as JSON."""

import json
import re
from pathlib import Path

import pytest

from quire.bench.workload import WorkloadSlice, named_jobs
from quire.cli import bench_processes
from quire.core.sampling import SamplingParams
from quire.llm import LLM
from tests.bench.conftest import TINY
from tests.cli.commands import Shell

ENGINE = ("--model", "tiny", "--load-format", "dummy", "--device", "cpu", "--threads", "1", "--kv-cache-memory", "1MiB")
GRAMMAR_ENGINE = ("--model", "wordy", *ENGINE[2:])
PART = ("--requests", "3", "--scale", "0.01", "--repeats", "2")


def test_throughput_is_reported_with_its_environment(quire: Shell) -> None:
    result = quire("bench", "throughput", *ENGINE, *PART, "--workload", "nano,exp", "--json")
    assert result.status == 0, result.err
    nano, exp = map(json.loads, result.out.splitlines())
    assert (nano["workload"], nano["seed"], exp["workload"], exp["seed"]) == ("nano", 0, "exp", 2)
    jobs = named_jobs("nano", TINY.vocab_size, part=WorkloadSlice(3, 0.01))
    assert nano["requests"] == 3
    assert nano["input_tokens"] == sum(len(job.prompt) for job in jobs)
    assert nano["output_tokens"] == sum(job.num_output for job in jobs)
    assert nano["output_tokens_per_s"] == nano["output_tokens"] / nano["seconds"]
    assert len(nano["repeats"]) == 2
    first, second = (repeat["seconds"] for repeat in nano["repeats"])
    assert nano["seconds"] == (first + second) / 2
    assert not nano["whole"], "a part is not the workload"
    assert nano["settings"]["regime"] == "chunked", "the prefix cache is off"
    assert nano["repeats"][0]["gpu_busy"] is None and "the device is the CPU" in nano["repeats"][0]["gpu_busy_note"]
    assert nano["command"].startswith("quire bench throughput --model tiny")
    assert {"quire", "torch", "python", "numpy"} <= nano["versions"].keys()
    assert nano["machine"]["device"] == "cpu"


def test_workloads_measured_before_a_failure_are_shown(quire: Shell) -> None:
    result = quire("bench", "throughput", *ENGINE, "--repeats", "1", "--workload", "2x8+2,1x100000+2")
    assert result.status == 2 and "this engine's context is 256" in result.err
    assert "2x8+2" in result.out, "the table holds the workloads that ended"


@pytest.mark.parametrize("verb", ["throughput", "latency"])
def test_sampling_options_reach_the_engine(quire: Shell, verb: str, monkeypatch: pytest.MonkeyPatch) -> None:
    received: list[SamplingParams] = []
    generate = LLM.generate

    def recording(self: LLM, prompts, params, **others):
        received.extend(params)
        return generate(self, prompts, params, **others)

    monkeypatch.setattr(LLM, "generate", recording)
    flags = ("--temperature", "0.6", "--top-p", "0.9", "--top-k", "20", "--repetition-penalty", "1.1")
    flags += ("--logprobs", "2", "--prompt-logprobs", "1")
    result = quire("bench", verb, *ENGINE, "--repeats", "1", "--workload", "3x8+4", *flags, "--json")
    assert result.status == 0, result.err
    options = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
    options |= {"logprobs": 2, "prompt_logprobs": 1}
    assert json.loads(result.out)["sampling"] == options
    assert received == [SamplingParams(**options, max_tokens=4, ignore_eos=True)] * 6, "the warm-up and the repeat"


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_grammar_is_measured_beside_the_same_requests_without_it(
    quire: Shell, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs have their forced lengths, as beginnings of a list that follows the schema."""
    outputs: list[list[str]] = []
    generate = LLM.generate

    def recording(self: LLM, prompts, params, **others):
        found = generate(self, prompts, params, **others)
        outputs.append([each.outputs[0].text for each, asked in zip(found, params, strict=True) if asked.grammar])
        return found

    monkeypatch.setattr(LLM, "generate", recording)
    options = ("--repeats", "2", "--workload", "4x8+20", "--grammar", "json", "--grammar-share", str(share), "--json")
    result = quire("bench", "throughput", *GRAMMAR_ENGINE, *options)
    assert result.status == 0, result.err
    without, under = map(json.loads, result.out.splitlines())
    assert without["grammar"] is None and under["grammar"]["share"] == share
    assert without["output_tokens"] == under["output_tokens"] == 80
    assert [len(run) for run in outputs] == [round(4 * each) for each in (0, share, 0, share, share, 0)], "in turns"
    for text in (text for run in outputs for text in run):
        assert re.fullmatch(r'\[\s*\{\s*(".*)?', text, re.DOTALL), text


def test_a_grammar_is_shown_as_a_ratio(quire: Shell, tmp_path: Path) -> None:
    schema = tmp_path / "numbers.json"
    schema.write_text(json.dumps({"$ref": "#/$defs/n", "$defs": {"n": {"type": "integer"}}}))
    options = ("--repeats", "1", "--workload", "2x8+4", "--grammar", str(schema))
    result = quire("bench", "latency", *GRAMMAR_ENGINE, *options)
    assert result.status == 0, result.err
    assert "2x8+4: with the grammar" in result.out and "times the tokens per second without it" in result.out
    for text, reason in (("[1]", "holds no object"), ("{", "cannot be read as a JSON schema")):
        schema.write_text(text)
        result = quire("bench", "latency", *GRAMMAR_ENGINE, *options)
        assert result.status == 2 and reason in result.err


def test_the_prefix_cache_is_empty_before_each_repeat(quire: Shell) -> None:
    result = quire("bench", "throughput", *ENGINE, "--block-size", "4", *PART, "--prefix-cache", "--json")
    report = json.loads(result.out)
    assert report["settings"]["regime"] == "prefix"
    assert [repeat["cached_tokens"] for repeat in report["repeats"]] == [0, 0]


def test_latency_is_derived_from_its_steps(quire: Shell) -> None:
    result = quire("bench", "latency", *ENGINE, "--scale", "0.05", "--repeats", "1", "--workload", "bs8", "--json")
    assert result.status == 0, result.err
    report = json.loads(result.out)
    assert (report["requests"], report["input_tokens"], report["output_tokens"]) == (8, 8 * 52, 8 * 7)
    [repeat] = report["repeats"]
    assert sum(each["prompt_tokens"] for each in repeat["steps"]) == 8 * 52
    assert sum(each["output_tokens"] for each in repeat["steps"]) == 8 * 7
    done = [each["done_s"] for each in repeat["steps"]]
    assert done == sorted(done)
    assert report["gap_ms"]["p50"] <= report["gap_ms"]["p90"] <= report["gap_ms"]["p99"] <= report["gap_ms"]["max"]
    assert len(repeat["first_token_s"]) == 8
    assert report["ms_per_token"] == 1000 * report["seconds"] / 7


def test_a_prefill_has_a_first_token_and_no_gaps(quire: Shell) -> None:
    result = quire(
        "bench", "latency", *ENGINE, "--scale", "0.01", "--repeats", "1", "--workload", "prefill8k", "--json"
    )
    report = json.loads(result.out)
    assert (report["input_tokens"], report["output_tokens"], report["gap_ms"]) == (82, 1, None)
    assert report["first_token_ms"]["p50"] > 0


def test_tables_mark_a_part_as_a_trial(quire: Shell) -> None:
    result = quire("bench", "throughput", *ENGINE, *PART)
    assert "nano" in result.out and "a trial" in result.out and "the device is the CPU" in result.out
    assert "· greedy ·" in result.out
    result = quire("bench", "throughput", *ENGINE, *PART, "--temperature", "0.6", "--top-k", "20")
    assert "· temperature 0.6, top_k 20 ·" in result.out, result.err
    result = quire("bench", "latency", *ENGINE, "--scale", "0.01", "--repeats", "1", "--workload", "bs8,prefill2k")
    assert "bs8" in result.out and "prefill2k" in result.out, result.err


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
def test_wrong_names_are_refused_with_the_known_ones(quire: Shell, arguments: tuple[str, ...], words: str) -> None:
    result = quire("bench", *arguments)
    assert result.status == 2
    assert words in result.err


@pytest.mark.parametrize("verb", ["throughput", "latency"])
def test_a_shape_is_reported_as_it_was_written(quire: Shell, verb: str) -> None:
    result = quire("bench", verb, *ENGINE, "--repeats", "1", "--workload", "3x8..16+02..5", "--json")
    assert result.status == 0, result.err
    report = json.loads(result.out)
    jobs = named_jobs("3x8..16+2..5", TINY.vocab_size)
    assert (report["workload"], report["seed"], report["requests"], report["whole"]) == ("3x8..16+02..5", 1, 3, True)
    assert report["input_tokens"] == sum(len(job.prompt) for job in jobs)
    assert report["output_tokens"] == sum(job.num_output for job in jobs)


def test_a_workload_beyond_the_context_is_refused_before_its_warm_up(quire: Shell) -> None:
    result = quire("bench", "throughput", *ENGINE, "--workload", "2x200+57")
    assert result.status == 2 and "2x200+57: warm-up" not in result.err
    assert "2x200+57 has a request of 200 tokens in and 57 out, 257 in all" in result.err
    assert "this engine's context is 256. Use --max-model-len 257" in result.err


def test_race_passes_the_workload_to_quire(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    monkeypatch.setattr(bench_processes, "race", lambda ours, *others: commands.append(ours))
    result = quire("bench", "race", "--rival", "true", "--", "throughput", "--workload", "nano,5x3..9+4")
    assert result.status == 0, result.err
    assert commands[0][2:] == ["quire", "bench", "throughput", "--workload", "nano,5x3..9+4", "--json"]
