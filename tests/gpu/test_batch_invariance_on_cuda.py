"""The batch-invariant mode on a GPU: tiles of GEMMs, and a request in random batches, compared bit by bit."""

import random
from collections.abc import Callable, Iterator

import pytest
import torch

from quire.core.sampling import SamplingParams
from quire.kernels.gpu.batch_invariant import BatchInvariantKernels
from quire.kernels.gpu.gemm.batch_invariant import FEW_ROWS, MANY_ROWS, SOME_ROWS, batch_invariant_gemm
from quire.llm import LLM
from quire.models.decoder import Decoder
from tests.models.families import FAMILIES, Family, build
from tests.models.running import Schedule, in_chunks, run
from tests.models.test_decoder import LENGTHS, prompts

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _whole_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32  # of transformers, which is compared with
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("in_width", "out_width"), [(4096, 6144), (14336, 4096), (576, 1536), (1000, 77)])
def test_a_row_has_the_same_bits_with_every_tile_and_number_of_rows(dtype, in_width: int, out_width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(in_width)
    x = torch.randn(1000, in_width, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(out_width, in_width, generator=generator, device="cuda").to(dtype)
    exact = x.double() @ weight.double().T
    for out in (None, torch.empty(1000, out_width, device="cuda")):
        whole = batch_invariant_gemm(x, weight, None, out).clone()
        assert (whole - exact).abs().max() <= exact.abs().max() * 2**-8
        for tiles in (FEW_ROWS, SOME_ROWS, MANY_ROWS):
            assert torch.equal(batch_invariant_gemm(x, weight, None, out, tiles), whole)
        for count in (1, 2, 15, 64, 65, 192, 193, 999):
            start = 1000 - count
            few = None if out is None else out[:count]
            assert torch.equal(batch_invariant_gemm(x[start:].contiguous(), weight, None, few), whole[start:])


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_family_agrees_with_transformers_and_with_itself_in_every_batch(family: Family) -> None:
    """In float32 with transformers; in bfloat16 with itself: prompts alone token by token, together, and in chunks."""
    twin, half = build(family, device="cuda"), build(family, torch.bfloat16, device="cuda")
    model = Decoder(twin.spec, twin.weights, BatchInvariantKernels(), 32)
    with torch.inference_mode():
        expected = [twin.peer(torch.tensor([prompt], device="cuda")).logits[0].float() for prompt in prompts(LENGTHS)]
    ours = run(model, prompts(LENGTHS), in_chunks(LENGTHS, 7), device="cuda")
    for mine, theirs in zip(ours, expected, strict=True):
        assert (mine - theirs).abs().max().item() <= 2e-4
    model = Decoder(half.spec, half.weights, BatchInvariantKernels(), 32)
    alone = [run(model, [prompt], in_chunks([len(prompt)], 1), device="cuda")[0] for prompt in prompts(LENGTHS)]
    schedules: list[Schedule] = [[dict(enumerate(LENGTHS))], in_chunks(LENGTHS, 1), in_chunks(LENGTHS, 5)]
    for schedule in schedules:
        for mine, expected_bits in zip(run(model, prompts(LENGTHS), schedule, device="cuda"), alone, strict=True):
            assert torch.equal(mine, expected_bits)


Found = tuple[list[int], list[dict[int, float]]]


class Engine:
    """An engine at a real shape with random weights, and requests with their log-probabilities."""

    def __init__(self, **settings: object) -> None:
        self._llm = LLM("qwen3-0.6b", load_format="dummy", device="cuda", max_model_len=4096, max_num_seqs=64,
                        kv_cache_memory="4GiB", **settings)  # fmt: skip

    def generate(self, requests: list[tuple[list[int], SamplingParams]]) -> list[Found]:
        outputs = self._llm.generate([prompt for prompt, _ in requests], [params for _, params in requests],
                                     progress=False)  # fmt: skip
        first = [output.outputs[0] for output in outputs]
        return [(one.token_ids, [{t: p.logprob for t, p in found.items()} for found in one.logprobs or []])
                for one in first]  # fmt: skip

    def close(self) -> None:
        self._llm.close()


def needles(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    """Requests that are looked for: short and long, greedy and drawn."""
    lengths = (1, 17, 400, 2900)
    return [
        ([rng.randrange(50_000) for _ in range(length)],
         SamplingParams(temperature=place % 2, seed=place, max_tokens=24, logprobs=5, ignore_eos=True))
        for place, length in enumerate(lengths)
    ]  # fmt: skip


def others(rng: random.Random) -> list[tuple[list[int], SamplingParams]]:
    length = rng.choice((8, 100, 700))
    return [
        ([rng.randrange(50_000) for _ in range(rng.randrange(1, length))],
         SamplingParams(temperature=1, max_tokens=rng.randrange(1, 24), ignore_eos=True))
        for _ in range(rng.randrange(60))
    ]  # fmt: skip


def mismatches(engine: Engine, num_batches: int) -> int:
    """How many of the needles' outputs differ in any bit from those of each needle alone."""
    rng = random.Random(12)
    looked_for = needles(rng)
    alone = [engine.generate([needle])[0] for needle in looked_for]
    count = 0
    for _ in range(num_batches):
        place = rng.randrange(len(looked_for))
        batch = others(rng)
        at = rng.randrange(len(batch) + 1)
        batch.insert(at, looked_for[place])
        count += engine.generate(batch)[at] != alone[place]
    return count


@pytest.mark.parametrize("caching", [True, False], ids=["cached prefixes", "no cache"])
def test_a_request_has_the_same_bits_in_random_batches(caching: bool, dose: Callable[[int], int]) -> None:
    """1,000 batches by `--dose`. With cached prefixes a needle's prompt comes from the cache after its first batch."""
    engine = Engine(batch_invariant=True, enable_prefix_caching=caching)
    try:
        assert mismatches(engine, dose(20)) == 0
    finally:
        engine.close()


def test_drafts_change_no_bit() -> None:
    plain, drafting = Engine(batch_invariant=True), Engine(batch_invariant=True, speculative="ngram")
    try:
        rng = random.Random(5)
        repeated = [rng.randrange(50_000) for _ in range(30)] * 20
        request = [(repeated, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))] * 3
        assert plain.generate(request) == drafting.generate(request)
    finally:
        plain.close()
        drafting.close()
