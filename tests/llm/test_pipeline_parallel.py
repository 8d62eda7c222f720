"""A model whose layers are divided among processes: the same answers as one, with a step in every stage."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, EngineFailed
from quire.sched.audit import audit_rest
from tests.llm.conftest import SMALL_SETTINGS as SETTINGS
from tests.llm.test_families import NAMES
from tests.llm.test_families import PROMPTS as FAMILY_PROMPTS
from tests.llm.test_tensor_parallel import PROMPTS, rank_pids
from tests.llm.tiny import write_model
from tests.models.families import FAMILIES, VOCAB, build
from tests.tiers import long_only

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def staged(tiny_folder: Path) -> Iterator[LLM]:
    """A pool of 14 blocks in both stages, and as many on the host: rows are preempted, and prefixes swapped."""
    block_bytes = 2 * 1 * 2 * 16 * 16 * 4  # one layer of two
    sizes = {"block_size": 16, "kv_cache_memory": 14 * block_bytes, "host_kv_memory": 14 * block_bytes}
    with LLM(str(tiny_folder), pipeline_parallel_size=2, **sizes, **SETTINGS) as llm:
        yield llm


@pytest.mark.parametrize(
    "params",
    [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, seed=7, n=3, max_tokens=12, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, use_beam_search=True, beam_width=3, n=2, max_tokens=6),
        SamplingParams(temperature=0.0, max_tokens=12, regex="[a-c]{3,9}"),
    ],
    ids=["greedy", "siblings", "beams", "grammar"],
)
def test_two_stages_answer_as_one_process_does(one: LLM, staged: LLM, params: SamplingParams) -> None:
    expected, found = one.generate(PROMPTS, params), staged.generate(PROMPTS, params)
    assert [[each.token_ids for each in output.outputs] for output in found] == [
        [each.token_ids for each in output.outputs] for output in expected
    ]


def test_blocks_were_moved_in_every_stage(staged: LLM) -> None:
    staged.generate([f"{number} {PROMPTS[2]}" for number in range(4)], SamplingParams(temperature=0.0, max_tokens=12))
    counters = staged.built.engine.scheduler.counters
    assert counters.preemptions > 0
    assert counters.moved_blocks > 0
    audit_rest(staged.built.engine.scheduler)


def test_the_ledger_has_the_bytes_of_one_stage(one: LLM, staged: LLM) -> None:
    assert staged.built.info.num_ranks == staged.built.info.pipeline_parallel_size == 2
    assert staged.built.resolved.run_ahead == 1, "a step in every stage"
    assert staged.built.memory.kv == 14 * 2 * 2 * 16 * 16 * 4
    assert staged.built.memory.weights < 0.75 * one.built.memory.weights


def test_logprobs_and_embeddings_come_from_the_last_stage(one: LLM, staged: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=2, prompt_logprobs=1)
    for mine, theirs in zip(staged.generate(PROMPTS[:2], params), one.generate(PROMPTS[:2], params), strict=True):
        for left, right in zip(mine.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
            assert {token: each.logprob for token, each in left.items()} == pytest.approx(
                {token: each.logprob for token, each in right.items()}, abs=1e-3
            )
        assert len(mine.prompt_logprobs) == len(theirs.prompt_logprobs)
    [mine], [theirs] = staged.embed("words"), one.embed("words")
    assert mine.embedding == pytest.approx(theirs.embedding, abs=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_parallel_size": 3}, "the model has 2 layers, .* Use pipeline_parallel_size=2 or less."),
        ({"pipeline_parallel_size": 2, "speculative": "ngram"}, 'Use speculative="off", or tensor_parallel_size'),
    ],
)
def test_what_no_pipeline_can_do_is_refused(tiny_folder: Path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(str(tiny_folder), **settings)


@pytest.mark.parametrize(("size", "num_stages"), long_only([(2, 2), (4, 1)]))
def test_stages_of_several_ranks(tiny_folder: Path, one: LLM, size: int, num_stages: int) -> None:
    expected = one.generate(PROMPTS, GREEDY)
    sizes = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages, "kv_cache_memory": 4 << 20}
    with LLM(str(tiny_folder), **sizes, **SETTINGS) as llm:
        found = llm.generate(PROMPTS, GREEDY)
        assert len(rank_pids(os.getpid())) >= size * num_stages - 1
    assert [each.outputs[0].token_ids for each in found] == [each.outputs[0].token_ids for each in expected]


@pytest.mark.parametrize("name", long_only(NAMES))
def test_greedy_tokens_of_every_family(tmp_path: Path, name: str) -> None:
    peer = build(next(family for family in FAMILIES if family.name == name)).peer
    folder = str(write_model(tmp_path, peer, num_tokens=VOCAB))
    prompts = [{"prompt_token_ids": prompt} for prompt in FAMILY_PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    expected = [each.outputs[0].token_ids for each in LLM(folder, dtype="float32").generate(prompts, params)]
    for size, num_stages in ((1, 2), (2, 2), (2, 1), (4, 1)):
        with LLM(folder, dtype="float32", tensor_parallel_size=size, pipeline_parallel_size=num_stages) as llm:
            assert [each.outputs[0].token_ids for each in llm.generate(prompts, params)] == expected


def test_a_killed_stage_fails_the_engine_with_its_name(staged: LLM) -> None:
    """The last test of this engine."""
    [rank] = rank_pids(os.getpid())
    os.kill(rank, signal.SIGKILL)
    with pytest.raises(EngineFailed, match=rf"Rank 1 \(process {rank}\) ended by signal 9, SIGKILL"):
        staged.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True))
    staged.close()
    assert rank_pids(os.getpid()) == []
