"""The named workloads are the published ones, to the token."""

import pytest

from quire.bench.workload import WORKLOADS, Part, named_jobs

LARGE = 1 << 20  # a vocabulary in which no id is folded

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
def test_a_name_means_the_published_requests(name: str) -> None:
    jobs = named_jobs(name, LARGE)
    lengths = [len(job.prompt) for job in jobs]
    ids = sum(sum(job.prompt) for job in jobs)
    assert (len(jobs), sum(lengths), sum(job.num_output for job in jobs), ids) == PUBLISHED[name]


def test_lengths_follow_the_seed_alone() -> None:
    drawn = [named_jobs(name, LARGE, seed=7) for name in ("nano", "nano", "exp", "exp")]
    assert drawn[0] == drawn[1] and drawn[2] == drawn[3]
    assert [job.num_output for job in drawn[0]] != [job.num_output for job in named_jobs("nano", LARGE)]


def test_a_part_has_the_first_requests_and_no_length_of_nothing() -> None:
    whole, part = named_jobs("nano", LARGE), named_jobs("nano", LARGE, part=Part(3, 0.01))
    assert [len(job.prompt) for job in part] == [-(-len(job.prompt) // 100) for job in whole[:3]]
    assert [job.num_output for job in part] == [-(-job.num_output // 100) for job in whole[:3]]
    assert [job.prompt for job in part] == [
        job.prompt[: len(few.prompt)] for job, few in zip(whole, part, strict=False)
    ]
    assert Part().whole and not Part(requests=3).whole and not Part(scale=0.5).whole


def test_a_small_vocabulary_folds_ids_and_no_lengths() -> None:
    small, large = named_jobs("bs8", 97), named_jobs("bs8", LARGE)
    assert [job.prompt for job in small] == [[token % 97 for token in job.prompt] for job in large]
    assert max(max(job.prompt) for job in small) < 97
