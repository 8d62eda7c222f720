"""Steps in flight change nothing that anybody can see: the same answers at depth 0, 1 and 2."""

from pathlib import Path
from typing import NamedTuple

import pytest

from quire import LLM, SamplingParams
from quire.sched.audit import audit_rest
from tests.llm.tiny import byte_ids, tiny_llama, write_model

COMMON = {"max_tokens": 25, "logprobs": 2}
PARAMS = [
    SamplingParams(temperature=0.0, **COMMON),
    SamplingParams(seed=1, n=2, **COMMON),
    SamplingParams(seed=2, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.5, **COMMON),
    SamplingParams(seed=3, top_k=20, top_p=0.9, min_p=0.01, prompt_logprobs=2, **COMMON),
    SamplingParams(seed=4, stop=["ab", "c"], allowed_token_ids=byte_ids("abcd"), **COMMON),
    SamplingParams(seed=5, bad_words=["ab"], allowed_token_ids=byte_ids("ab"), min_tokens=4, **COMMON),
    SamplingParams(seed=6, stop_token_ids=byte_ids("bc"), allowed_token_ids=byte_ids("abcdef"), max_tokens=25),
    SamplingParams(temperature=0.0, max_tokens=1),
]
PROMPTS = ["a", "two words", "x" * 30, "the third of them", "stop", "bad", "ids", "short"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("depths"), tiny_llama())


class Answers(NamedTuple):
    said: list[tuple[list[int], str, str, int | str | None]]
    scores: list[float]


def answers(folder: Path, **settings: object) -> Answers:
    llm = LLM(str(folder), dtype="float32", **settings)
    outputs = llm.generate(PROMPTS, PARAMS)
    audit_rest(llm.built.engine.scheduler)
    completions = [completion for output in outputs for completion in output.outputs]
    entries = [entry for completion in completions for entry in completion.logprobs or []]
    entries += [entry for output in outputs for entry in (output.prompt_logprobs or [])[1:]]
    return Answers(
        [(one.token_ids, one.text, one.finish_reason, one.stop_reason) for one in completions],
        [score.logprob for entry in entries for score in entry.values()],
    )


@pytest.fixture(scope="module")
def reference(folder: Path) -> Answers:
    """One request at a time (the one with two sequences takes both rows), one step at a time."""
    return answers(folder, run_ahead=0, max_num_seqs=2, enable_prefix_caching=False)


@pytest.mark.parametrize("run_ahead", [0, 1, 2])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 3, "max_num_batched_tokens": 5, "block_size": 2},
        {"kv_cache_memory": 64 * 2 * 2 * 2 * 16 * 4, "block_size": 4},
    ],
    ids=["roomy", "few rows", "few blocks"],
)
def test_the_same_answers_at_every_depth(folder, reference, run_ahead, settings):
    found = answers(folder, run_ahead=run_ahead, **settings)
    assert found.said == reference.said
    # The shape of a batch shows in the last bits of a matrix product.
    assert found.scores == pytest.approx(reference.scores, abs=1e-4)
