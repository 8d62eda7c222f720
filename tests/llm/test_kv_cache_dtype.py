"""A quantized KV cache: more tokens in the same memory, and answers that do not depend on copies, chunks or batches."""

from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.engine.build import build
from quire.engine.startup import StartupPhase, StartupReporter
from quire.sched.audit import audit_rest
from tests.kernels.cpu_kernels import needs_native
from tests.llm.test_prefix import mixed_work, tokens

pytestmark = needs_native

INT8 = {"dtype": "float32", "kv_cache_dtype": "int8"}
HEAD_DIM, PER_TOKEN = 16, 2 * 2 * 2 * (16 + 4)  # layers, keys and values, heads; codes and a scale


@pytest.fixture(scope="module")
def plain(tiny_folder: Path) -> LLM:
    """No prefix is reused, and every prompt is one chunk."""
    return LLM(str(tiny_folder), enable_prefix_caching=False, **INT8)


def test_reuse_forks_chunks_preemptions_and_swaps_change_no_token(tiny_folder: Path, plain: LLM) -> None:
    prompts, params = mixed_work(3)
    prompts += [[9 + place] * 7 for place in range(8)]
    params += [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)] * 8
    expected = tokens(plain.generate(prompts, params))
    small = LLM(
        str(tiny_folder), block_size=4, kv_cache_memory=200 * PER_TOKEN, max_num_seqs=8, max_num_batched_tokens=32,
        host_kv_memory=400 * PER_TOKEN, overcommit="optimistic", run_ahead=1, **INT8,
    )  # fmt: skip
    small.built.engine.scheduler.cost.set_transfer(1e-9)  # always worth it, whatever this machine measured
    outputs = [output for _ in range(2) for output in small.generate(prompts, params)]
    assert tokens(outputs) == expected * 2
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert sum(output.metrics.num_cached_tokens for output in outputs) > 0
    assert small.built.engine.scheduler.counters.moved_blocks > 0
    audit_rest(small.built.engine.scheduler)


def test_drafts_change_no_token(tiny_folder: Path, plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    drafting = LLM(str(tiny_folder), speculative="ngram", **INT8)
    prompts = [[7, 8, 9] * 9, [30, 31] * 20]
    assert tokens(drafting.generate(prompts, params)) == tokens(plain.generate(prompts, params))
    assert drafting.built.engine.scheduler.counters.drafted_tokens > 0


@pytest.mark.parametrize(
    ("name", "bytes_per_number", "described"),
    [
        ("auto", 4.0, "float32"),
        ("bfloat16", 2.0, "bfloat16"),
        ("float16", 2.0, "float16"),
        ("int8", 1.25, "int8 with a scale per token and head"),
    ],
)
def test_the_same_memory_holds_more_tokens(
    tiny_folder: Path, name: str, bytes_per_number: float, described: str
) -> None:
    phases: list[StartupPhase] = []
    config = EngineConfig(str(tiny_folder), dtype="float32", kv_cache_dtype=name, kv_cache_memory=1 << 20)
    built = build(config, StartupReporter(finished=phases.append))
    num_tokens = (1 << 20) // int(2 * 2 * 2 * HEAD_DIM * bytes_per_number) // 32 * 32
    assert built.resolved.num_blocks * 32 == num_tokens
    assert built.memory.kv == 1 << 20
    [reported] = [phase.detail for phase in phases if phase.name == "kv cache"]
    assert reported == f"0.00 GiB → {num_tokens:,} tokens in {described}"


@pytest.mark.long
def test_two_ranks_have_scales_of_their_own(tiny_folder: Path, plain: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    with LLM(str(tiny_folder), tensor_parallel_size=2, max_num_seqs=4, max_model_len=128, **INT8) as two:
        assert two.built.resolved.kv_bytes // (two.built.resolved.num_blocks * 16) >= PER_TOKEN // 2
        for prompt in ([5, 6, 7, 8], list(range(40, 80))):
            assert tokens(two.generate(prompt, params)) == tokens(plain.generate(prompt, params))
