"""A model divided among processes: the same answers as one, and no process that stays behind."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, EngineFailed
from quire.sched.audit import audit_rest
from tests.llm.conftest import SMALL_SETTINGS as SETTINGS

PROMPTS = ["a tale of two ranks", "b", "the quick brown fox jumps over the lazy dog " * 2, "a tale of three"]


def rank_pids(parent: int) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        try:
            command, status = (folder / "cmdline").read_bytes(), (folder / "stat").read_text()
        except OSError:
            continue
        if b"quire.engine.rank_main" in command and int(status.rpartition(")")[2].split()[1]) == parent:
            found.append(int(folder.name))
    return found


@pytest.fixture(scope="module")
def two(tiny_folder: Path) -> Iterator[LLM]:
    """A pool of 14 blocks for both ranks, and as many on the host: rows are preempted, and prefixes swapped."""
    block_bytes = 2 * 2 * 1 * 16 * 16 * 4  # one key head of two
    sizes = {"block_size": 16, "kv_cache_memory": 14 * block_bytes, "host_kv_memory": 14 * block_bytes}
    with LLM(str(tiny_folder), tensor_parallel_size=2, **sizes, **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=24),
        SamplingParams(temperature=0.8, top_p=0.9, seed=7, n=3, max_tokens=12, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, use_beam_search=True, beam_width=3, n=2, max_tokens=6),
        SamplingParams(temperature=1.0, seed=3, logit_bias={40: 5.0}, bad_words=["a"], max_tokens=9),
    ],
    ids=["greedy", "siblings", "beams", "biased"],
)
def test_two_ranks_answer_as_one_process_does(one: LLM, two: LLM, params: SamplingParams) -> None:
    expected, found = one.generate(PROMPTS, params), two.generate(PROMPTS, params)
    assert [[each.token_ids for each in output.outputs] for output in found] == [
        [each.token_ids for each in output.outputs] for output in expected
    ]


def test_blocks_were_moved_on_every_rank(two: LLM) -> None:
    """The answers above came from a pool that could not hold them: a rank that did not move a block would differ."""
    two.generate([f"{number} {PROMPTS[2]}" for number in range(4)], SamplingParams(temperature=0.0, max_tokens=12))
    counters = two.built.engine.scheduler.counters
    assert counters.preemptions > 0
    assert counters.moved_blocks > 0
    audit_rest(two.built.engine.scheduler)


def test_the_ledger_has_the_bytes_of_one_rank(one: LLM, two: LLM) -> None:
    assert two.built.info.tensor_parallel_size == 2
    assert two.built.memory.kv == 14 * 2 * 2 * 16 * 16 * 4
    assert two.built.memory.weights < 0.6 * one.built.memory.weights


def test_logprobs_and_embeddings_are_those_of_one_process(one: LLM, two: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    for mine, theirs in zip(two.generate(PROMPTS[:2], params), one.generate(PROMPTS[:2], params), strict=True):
        for left, right in zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert {token: each.logprob for token, each in left.items()} == pytest.approx(
                {token: each.logprob for token, each in right.items()}, abs=1e-3
            )
    [mine], [theirs] = two.embed("words"), one.embed("words")
    assert mine.embedding == pytest.approx(theirs.embedding, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 3}, "4 attention heads, 2 key heads .* Use tensor_parallel_size=1, 2 or 4."),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size must be a whole number from 1 to 64, not 0"),
    ],
)
def test_a_wrong_number_of_ranks_is_refused(tiny_folder: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_folder), **settings)


def test_a_killed_rank_fails_the_engine_with_its_name(two: LLM) -> None:
    """The last test of this engine."""
    [rank] = rank_pids(os.getpid())
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=rf"Rank 1 \(process {rank}\) ended by signal 9, SIGKILL"):
        two.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True))
    with pytest.raises(EngineFailed, match="failed in an earlier step"):
        two.generate(PROMPTS)
    two.close()
    assert rank_pids(os.getpid()) == []
