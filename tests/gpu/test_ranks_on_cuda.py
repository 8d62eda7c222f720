"""Ranks on GPUs. Where there is one GPU, two ranks share it: by gloo, eagerly, and by symmetric memory, captured.

NCCL refuses two ranks on one GPU. On one it is tested in a group of one rank, with its collectives inside of captured
steps; on two or more, as it is used.
"""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.core.errors import ConfigError, EngineFailed
from quire.core.sharding import Shard
from quire.core.step import StepPlan
from quire.dist.process_group import NcclGroup, new_rendezvous
from quire.engine.build import build
from quire.engine.outputs import RequestOutput
from quire.formats.presets import SHAPES
from quire.kernels.select import select_kernels
from quire.models.decoder import Decoder
from quire.runner.cuda_graphs import GraphCapturer
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.weights.allocate import dummy_weights
from tests.runner.plans import grants, row_start, sample

CUDA = torch.device("cuda")
SHARED = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own: two ranks may be on one GPU
SETTINGS = {"device": "cuda", "max_num_seqs": 8, "max_model_len": 256, "max_num_batched_tokens": 64}
# Of log-probabilities: what bfloat16 sums of two halves may differ by. One rank with other kernels differs as much.
EIGHT_B_TOLERANCE = 0.25


def prompts(vocab_size: int, count: int = 5) -> list[list[int]]:
    return [np.random.default_rng(place).integers(0, vocab_size, 3 + 17 * place).tolist() for place in range(count)]


@contextmanager
def engine(
    model: str, dtype: str, *, shared_gpu: str | None = None, serving: bool = False, **settings: object
) -> Iterator[LLM]:
    """With `shared_gpu`, two ranks on one GPU."""
    ranks = {} if shared_gpu is None else {"tensor_parallel_size": 2}
    kind = {"load_format": "dummy"} if model in SHAPES else {}
    config = EngineConfig(model, dtype=dtype, kv_cache_memory=1 << 30, **(kind | SETTINGS | ranks | settings))
    with LLM.over(build(config, shared_gpu=shared_gpu, serving=serving)) as llm:
        yield llm


def greedy(llm: LLM, asked: list[list[int]], max_tokens: int = 12) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, logprobs=2)
    return llm.generate(asked, params, progress=False)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_close(
    found: Sequence[RequestOutput], expected: Sequence[RequestOutput], tolerance: float
) -> tuple[int, float]:
    """Log-probabilities within the tolerance, and the same tokens, up to the first other one whose margin was within
    twice the tolerance. The number of tokens that were compared, and the largest difference."""
    num_compared, worst = 0, 0.0
    for mine, theirs in zip(found, expected, strict=True):
        left, right = mine.outputs[0], theirs.outputs[0]
        for place, (token, best) in enumerate(zip(right.token_ids, right.logprobs, strict=True)):
            first, second = sorted((each.logprob for each in best.values()), reverse=True)[:2]
            if first - second <= 2 * tolerance and left.token_ids[place] != token:
                break  # what follows has another context
            assert left.token_ids[place] == token, (place, first - second)
            worst = max(worst, abs(left.logprobs[place][token].logprob - best[token].logprob))
            num_compared += 1
    assert worst <= tolerance
    return num_compared, worst


@pytest.fixture(autouse=True)
def _whole_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SHARED, "1")
    torch.backends.cuda.matmul.allow_tf32 = False


def test_nccl_is_captured_and_replayed() -> None:
    group = NcclGroup(Shard(0, 1), new_rendezvous())
    x = torch.arange(6.0, device=CUDA).view(2, 3)
    assert group.all_reduce(x.clone()).tolist() == x.tolist() and group.all_gather(x).tolist() == [x.tolist()]

    def work() -> torch.Tensor:
        return group.all_gather(group.all_reduce(2 * x) + 1)

    replay = GraphCapturer(CUDA, group.least).capture(work)
    x += 10
    assert replay().tolist() == [(2 * x + 1).tolist()]
    group.close()


def test_steps_with_nccl_inside_are_captured() -> None:
    """A group of one rank: embeddings, sums and logits go through it, and the tokens are those without it."""
    spec, group = SHAPES["qwen3-0.6b"], NcclGroup(Shard(0, 1), new_rendezvous())
    weights = dummy_weights(spec, torch.float32, CUDA).filled()
    choice = select_kernels("cuda")

    def run(group: NcclGroup | None) -> tuple[list[list[int]], int]:
        model = Decoder(spec, weights, choice.kernels, 64, group)
        runner = ModelRunner(
            model,
            new_store(model.kv_geometry, 16, 16, CUDA),
            max_rows=4,
            max_length=64,
            row_kernels=choice.row_kernels,
            max_step_tokens=32,
            capture_share=1.0,
            least=None if group is None else group.least,
        )
        for _ in range(runner.num_first):
            runner.prepare()
        assert runner.step_times() is not None
        opening = StepPlan(
            0,
            starts=(row_start(0, [5, 6, 7]), row_start(1, [900, 3, 4, 8])),
            grants=grants({0: [1, 2], 1: [3, 4]}),
            chunks=(sample(0, 0, 3), sample(1, 0, 4)),
        )
        plans = [opening, *(StepPlan(step, num_decoding=2) for step in range(1, 12))]
        return [runner.launch(plan).wait().tokens.tolist() for plan in plans], runner.num_replayed

    assert run(group) == run(None) and run(group)[1] == 12
    group.close()


@pytest.mark.parametrize("backend", ["gloo", "symmetric"])
def test_two_ranks_on_one_gpu_answer_as_one(backend: str) -> None:
    asked = prompts(SHAPES["qwen3-0.6b"].vocab_size)
    with engine("qwen3-0.6b", "float32") as llm:
        expected = tokens(greedy(llm, asked))
    with engine("qwen3-0.6b", "float32", shared_gpu=backend) as llm:
        assert tokens(greedy(llm, asked)) == expected
        launches = llm.built.engine.launches
        assert (launches.replayed > 12 and launches.captured > 3) == (backend == "symmetric")
        captured = launches.captured
        while backend == "symmetric" and launches.captured < captured + 3:  # as an idle engine does
            llm.built.engine.prepare()
        assert tokens(greedy(llm, asked)) == expected
        drawn = SamplingParams(temperature=0.9, top_p=0.9, seed=7, n=2, max_tokens=8, ignore_eos=True)
        assert len(llm.generate(asked, drawn, progress=False)) == len(asked), "every rank drew the same tokens"
        assert llm.built.memory.kv == 1 << 30 and "on each of 2 ranks" in llm.built.memory.describe(2)


@pytest.mark.parametrize("backend", ["gloo", "symmetric"])
@pytest.mark.parametrize("name", ["gemma3", "qwen2"])
def test_two_ranks_of_other_families_answer_as_one(tmp_path: Path, name: str, backend: str) -> None:
    from tests.llm.tiny import write_model  # transformers is imported only for this
    from tests.models.families import FAMILIES, VOCAB, build

    [family] = [each for each in FAMILIES if each.name == name]
    folder, asked = write_model(tmp_path, build(family).peer, VOCAB), prompts(VOCAB, 3)
    with engine(str(folder), "float32", max_model_len=64) as llm:
        expected = tokens(greedy(llm, asked))
    with engine(str(folder), "float32", shared_gpu=backend, max_model_len=64) as llm:
        assert tokens(greedy(llm, asked)) == expected


class Answers(NamedTuple):
    """Greedy tokens of some prompts, and the likeliest tokens of every position of texts that are given."""

    generated: list[RequestOutput]
    scored: list[RequestOutput]

    @staticmethod
    def of(llm: LLM, texts: list[list[int]] | None = None) -> "Answers":
        """`texts`: by default the prompts with what was generated."""
        asked = prompts(SHAPES["llama-3.1-8b"].vocab_size)
        generated = greedy(llm, asked)
        texts = texts or [prompt + more for prompt, more in zip(asked, tokens(generated), strict=True)]
        return Answers(generated, llm.generate(texts, SamplingParams(max_tokens=1, prompt_logprobs=2), progress=False))

    @property
    def texts(self) -> list[list[int]]:
        return [list(output.prompt_token_ids) for output in self.scored]

    def compared(self, other: "Answers") -> str:
        """Asserts that both are close; says how close."""
        num_generated, worst = assert_close(self.generated, other.generated, EIGHT_B_TOLERANCE)
        differences, num_sure = [], 0
        for mine, theirs in zip(self.scored, other.scored, strict=True):
            positions = zip(theirs.prompt_token_ids, mine.prompt_logprobs, theirs.prompt_logprobs, strict=True)
            for token, left, right in list(positions)[1:]:  # nothing comes before the first
                differences.append(abs(left[token].logprob - right[token].logprob))
                first, second = sorted(right, key=lambda each: -right[each].logprob)[:2]
                if right[first].logprob - right[second].logprob > 2 * EIGHT_B_TOLERANCE:
                    num_sure += 1
                    assert max(left, key=lambda each: left[each].logprob) == first
        assert max(differences) <= EIGHT_B_TOLERANCE and num_sure > 3
        return (
            f"{num_generated} of 60 generated tokens differ by at most {worst:.3f}, {len(differences)} given by at "
            f"most {max(differences):.3f}; {num_sure} of these have a margin above {2 * EIGHT_B_TOLERANCE}"
        )


@pytest.fixture(scope="module")
def eight_b() -> Answers:
    """What one rank answers, which other kernels confirm within the tolerance."""
    with engine("llama-3.1-8b", "bfloat16") as llm:
        expected = Answers.of(llm)
    with engine("llama-3.1-8b", "bfloat16", batch_invariant=True) as llm:
        print("one rank, other kernels:", Answers.of(llm, expected.texts).compared(expected))
    return expected


@pytest.mark.parametrize("backend", ["gloo", "symmetric"])
def test_two_ranks_of_an_8b_model_are_close_to_one(eight_b: Answers, backend: str) -> None:
    """In bfloat16, whose sums differ in their last bits: log-probabilities, and tokens whose margin is larger."""
    with engine("llama-3.1-8b", "bfloat16", shared_gpu=backend, serving=backend == "symmetric") as llm:
        assert llm.built.memory.weights < 8.2e9, "half of 16 GB"
        print(f"two ranks, {backend}:", Answers.of(llm, eight_b.texts).compared(eight_b))
        print(llm.built.memory.describe(2))


def test_a_killed_rank_fails_the_engine() -> None:
    with engine("qwen3-0.6b", "float32", shared_gpu="gloo") as llm:
        [rank] = [
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdecimal() and b"quire.engine.rank_main" in (folder / "cmdline").read_bytes()
        ]
        os.kill(rank, signal.SIGKILL)
        with pytest.raises(EngineFailed, match=rf"Rank 1 \(process {rank}\) ended by signal 9, SIGKILL"):
            greedy(llm, prompts(1000), 100)


def test_more_ranks_than_gpus_are_refused() -> None:
    num_gpus = torch.cuda.device_count()
    size = next(size for size in (2, 4, 8, 16) if size > num_gpus)
    with pytest.raises(ConfigError, match=f"tensor_parallel_size is {size}, and torch finds {num_gpus} GPU"):
        LLM("llama-3.1-8b", load_format="dummy", device="cuda", tensor_parallel_size=size)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_ranks_with_a_gpu_each_answer_as_one() -> None:
    asked = prompts(SHAPES["qwen3-0.6b"].vocab_size)
    with engine("qwen3-0.6b", "float32") as llm:
        expected = tokens(greedy(llm, asked))
    with LLM("qwen3-0.6b", load_format="dummy", dtype="float32", tensor_parallel_size=2, **SETTINGS) as llm:
        assert tokens(greedy(llm, asked)) == expected
        assert llm.built.engine.launches.replayed > 12
