"""Named workloads equal the published ones, token by token; others follow their written shape."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench.workload import WORKLOADS, WorkloadSlice, find, named_jobs
from quire.core.errors import ConfigError

LARGE = 1 << 20  # a vocabulary larger than every id

# Requests, prompt tokens, output tokens and the sum of all prompt ids, from another engine's script of the same names.
PUBLISHED = {
    "nano": (256, 142_827, 133_966, 712_773_398),
    "1k1k": (256, 262_144, 262_144, 13_101_148_402),
    "exp": (512, 130_673, 64_112, 6_545_286_717),
    "bs1": (1, 128, 512, 6_789_723),
    "bs8": (8, 8192, 1024, 408_223_610),
    "bs64": (64, 65_536, 8192, 3_268_341_967),
    "bs256": (256, 262_144, 32_768, 13_101_148_402),
    "prefill2k": (1, 2048, 1, 103_292_681),
    "prefill8k": (1, 8192, 1, 408_223_610),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_named_workload_has_the_published_requests(name: str) -> None:
    jobs = named_jobs(name, LARGE)
    lengths = [len(job.prompt) for job in jobs]
    ids = sum(sum(job.prompt) for job in jobs)
    assert (len(jobs), sum(lengths), sum(job.num_output for job in jobs), ids) == PUBLISHED[name]


def test_lengths_follow_the_seed_alone() -> None:
    drawn = [named_jobs(name, LARGE, seed=7) for name in ("nano", "nano", "exp", "exp")]
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    assert [job.num_output for job in drawn[0]] != [job.num_output for job in named_jobs("nano", LARGE)]


def test_a_part_has_the_first_requests_and_no_length_of_zero() -> None:
    whole, part = named_jobs("nano", LARGE), named_jobs("nano", LARGE, part=WorkloadSlice(3, 0.01))
    assert [len(job.prompt) for job in part] == [-(-len(job.prompt) // 100) for job in whole[:3]]
    assert [job.num_output for job in part] == [-(-job.num_output // 100) for job in whole[:3]]
    assert [job.prompt for job in part] == [
        job.prompt[: len(few.prompt)] for job, few in zip(whole, part, strict=False)
    ]
    assert WorkloadSlice().whole and not WorkloadSlice(requests=3).whole and not WorkloadSlice(scale=0.5).whole


def test_a_small_vocabulary_changes_ids_and_no_lengths() -> None:
    small, large = named_jobs("bs8", 97), named_jobs("bs8", LARGE)
    assert [job.prompt for job in small] == [[token % 97 for token in job.prompt] for job in large]
    assert max(max(job.prompt) for job in small) < 97


@pytest.mark.parametrize(
    ("shape", "name"), [("256x1024+1024", "1k1k"), ("8x1024+128", "bs8"), ("1x128..128+512", "bs1")]
)
def test_a_shape_equal_to_a_named_workload_has_its_requests(shape: str, name: str) -> None:
    assert named_jobs(shape, LARGE) == named_jobs(name, LARGE)


def test_a_script_of_another_engine_draws_the_same_ranges() -> None:
    generator = random.Random(1)
    prompts = []
    for _ in range(5):
        length = generator.randint(3, 9)
        prompts.append([generator.randint(10, 100_000) for _ in range(length)])
    outputs = [generator.randint(4, 1000) for _ in range(5)]
    ranged, one_long = named_jobs("5x3..9+4..1000", LARGE), named_jobs("5x3..9+4", LARGE)
    assert [job.prompt for job in ranged] == prompts == [job.prompt for job in one_long]
    assert [job.num_output for job in ranged] == outputs
    assert named_jobs("5x3..9+4..1000", LARGE, seed=2, part=WorkloadSlice(2)) != ranged[:2]
    assert named_jobs("5x3..9+4..1000", LARGE, part=WorkloadSlice(2)) == ranged[:2]


lengths = st.tuples(st.integers(1, 40), st.just(0) | st.integers(1, 40)).map(lambda ends: range(ends[0], sum(ends) + 1))


@given(count=st.integers(1, 8), inputs=lengths, outputs=lengths, seed=st.integers(0, 9), ranged=st.booleans())
def test_a_shape_has_that_many_requests_of_those_lengths(
    count: int, inputs: range, outputs: range, seed: int, ranged: bool
) -> None:
    texts = [str(span[0]) if len(span) == 1 and not ranged else f"{span[0]}..{span[-1]}" for span in (inputs, outputs)]
    jobs = named_jobs(f"{count}x{'+'.join(texts)}", LARGE, seed)
    assert len(jobs) == count
    assert all(len(job.prompt) in inputs and job.num_output in outputs for job in jobs)
    assert all(10 <= token <= 100_000 for job in jobs for token in job.prompt)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0x5+5", "0x5+5 has 0 requests; use 1 or more"),
        ("5x0+1", "prompts of 0 tokens; use 1 or more"),
        ("5x1+0..3", "answers of 0 tokens"),
        ("5x10..3+1", "prompts of 10..3 tokens; the smaller number comes first: 3..10"),
        ("5x10+7..0", "answers of 0 tokens"),
        ("1001x1..100000+1", "up to 100,100,000 tokens of prompts, more than the 100,000,000"),
        *((text, "written as COUNTxIN+OUT, such as 64x4096+16") for text in (
            "5x10", "x5+5", "5x+5", "5x5+", "5x5..+5", "-5x5+5", "5x5+5 ", "5X5+5", "٥x5+5", "5x5+" + "9" * 5000,
        )),
    ],
)  # fmt: skip
def test_an_invalid_shape_is_refused_with_its_numbers(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        find(text)
    assert words in refusal.value.message and len(refusal.value.message) < 400
