"""A tiny real decoder behind the runner: candidates are a softmax's, and moved blocks are as good as computed ones."""

from functools import cache

import torch
from torch import Tensor

from quire.core.ids import Row
from quire.core.step import AppendTokens, Candidates, StepPlan, StepResult
from quire.kernels.select import select_kernels
from quire.models.decoder import Decoder
from quire.runner.cuda_graphs import StepTimes
from quire.runner.kv_store import new_store
from quire.runner.model_runner import ModelRunner
from quire.runner.warmup import time_steps
from tests.models.families import FAMILIES, build
from tests.models.running import in_chunks, run
from tests.runner.plans import DEVICE, HOST, emitted, grants, host_driven, moves, row_start, sample

BLOCK = 4
PROMPT = [3, 70, 12, 99, 5, 5, 31, 118, 40, 7]


@cache
def decoder() -> Decoder:
    twin = build(FAMILIES[0])
    return Decoder(twin.spec, twin.weights, select_kernels("cpu").kernels, 40)


def new_runner() -> ModelRunner:
    """Unwritten memory is poison."""
    stores = new_store(decoder().kv_geometry, 20, BLOCK, torch.device("cpu"), num_host_blocks=8)
    assert stores.host is not None
    stores.device.fill_(float("nan"))
    stores.device[0] = 0
    stores.host.fill_(float("nan"))
    return ModelRunner(decoder(), stores, max_rows=4, max_length=40)


def logits_after(known: list[int]) -> Tensor:
    return run(decoder(), [known], in_chunks([len(known)], len(known)))[0][-1].clone()


def assert_likeliest(found: Candidates, logits: Tensor, count: int) -> None:
    assert_best(found, torch.log_softmax(logits.float(), dim=0), count)


def assert_best(found: Candidates, logprobs: Tensor, count: int) -> None:
    expected = logprobs.topk(count)
    assert found.ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(torch.from_numpy(found.logprobs.copy()), expected.values, atol=1e-4, rtol=0)


def test_candidates_are_the_likeliest_of_a_softmax() -> None:
    runner = new_runner()
    first = runner.launch(
        StepPlan(
            0,
            starts=(
                row_start(0, PROMPT, num_candidates=6, temperature=0.3),
                row_start(1, PROMPT[:7], num_candidates=2),
            ),
            grants=grants({0: [1, 2, 3], 1: [4, 5]}),
            chunks=(host_driven(0, 0, 10), host_driven(1, 0, 7)),
        )
    ).wait()
    assert_likeliest(first.candidates[Row(0)], logits_after(PROMPT), 6)
    assert_likeliest(first.candidates[Row(1)], logits_after(PROMPT[:7]), 2)
    third = int(first.candidates[Row(0)].ids[2])
    second = runner.launch(
        StepPlan(1, appends=(AppendTokens(Row(0), (third,)),), chunks=(host_driven(0, 10, 11),))
    ).wait()
    assert_likeliest(second.candidates[Row(0)], logits_after([*PROMPT, third]), 6)


def test_candidates_come_after_all_that_shapes_log_probabilities() -> None:
    """Bias, forbidden tokens, bad words and penalties, which count what the row was told. Nothing is normalised after
    them: transformers' beam search does not."""
    runner = new_runner()
    logprobs = torch.log_softmax(logits_after(PROMPT).float(), dim=0)
    order = logprobs.argsort(descending=True).tolist()
    sampling = {
        "num_candidates": 5,
        "logit_bias": ((order[3], 4.0),),
        "bad_words": ((order[1],), (order[0], order[2])),
        "end_ids": (order[4],),
        "min_tokens": 2,
        "frequency_penalty": 2.0,
    }
    first = runner.launch(
        StepPlan(
            0,
            starts=(row_start(0, PROMPT, **sampling),),
            grants=grants({0: [1, 2, 3, 4]}),
            chunks=(host_driven(0, 0, 10),),
        )
    ).wait()
    logprobs[order[3]] += 4.0
    logprobs[[order[1], order[4]]] = float("-inf")
    assert_best(first.candidates[Row(0)], logprobs, 5)

    said = (order[5], order[5], order[0])
    second = runner.launch(StepPlan(1, appends=(AppendTokens(Row(0), said),), chunks=(host_driven(0, 10, 13),))).wait()
    logprobs = torch.log_softmax(logits_after([*PROMPT, *said]).float(), dim=0)
    logprobs[order[3]] += 4.0
    logprobs[[order[1], order[2]]] = float("-inf")
    logprobs[order[5]] -= 4.0
    logprobs[order[0]] -= 2.0
    assert_best(second.candidates[Row(0)], logprobs, 5)


def test_tokens_that_are_not_allowed_come_last_as_impossible() -> None:
    sampling = {"num_candidates": 4, "allowed_ids": (7, 9)}
    plan = StepPlan(
        0, starts=(row_start(0, PROMPT, **sampling),), grants=grants({0: [1, 2, 3]}), chunks=(host_driven(0, 0, 10),)
    )
    found = new_runner().launch(plan).wait().candidates[Row(0)]
    assert sorted(found.ids[:2].tolist()) == [7, 9] and found.ids[2:].tolist() == [0, 1]
    assert found.logprobs[2:].tolist() == [float("-inf")] * 2


def told(result: StepResult) -> tuple[int, float]:
    """The token of row 0 and its score, in every bit."""
    return emitted(result)[0], result.logprobs[Row(0)][0].logprob


def decode(runner: ModelRunner, steps: range) -> list[tuple[int, float]]:
    return [told(runner.launch(StepPlan(step, num_decoding=1)).wait()) for step in steps]


def test_a_row_moved_through_the_host_goes_on_bit_by_bit_as_if_it_had_stayed() -> None:
    opening = StepPlan(
        0, starts=(row_start(0, PROMPT, num_logprobs=0),), grants=grants({0: range(1, 7)}), chunks=(sample(0, 0, 10),)
    )
    stayed, moved = new_runner(), new_runner()
    expected = [told(stayed.launch(opening).wait()), *decode(stayed, range(1, 10))]
    found = [told(moved.launch(opening).wait()), *decode(moved, range(1, 5))]
    assert found == expected[:5]

    known = [*PROMPT, *(token for token, _ in found)]  # fifteen; the last is not computed yet
    poison = moves(DEVICE, DEVICE, *((20, block) for block in range(1, 7)))
    moved.launch(StepPlan(5, moves=moves(DEVICE, HOST, (1, 3), (2, 5), (3, 1), (4, 2)) + poison, releases=(Row(0),)))
    back = StepPlan(
        6,
        moves=moves(HOST, DEVICE, (3, 9), (5, 8), (1, 11), (2, 10)),
        starts=(row_start(0, known, num_prompt=10, num_logprobs=0),),
        grants=grants({0: [9, 8, 11, 10, 12]}),
        chunks=(sample(0, 14, 15),),
    )
    found += [told(moved.launch(back).wait()), *decode(moved, range(7, 11))]
    assert found == expected


def test_a_fork_with_a_copied_block_goes_on_bit_by_bit_as_its_sibling() -> None:
    runner = new_runner()
    opening = StepPlan(
        0, starts=(row_start(0, PROMPT, num_logprobs=0),), grants=grants({0: range(1, 6)}), chunks=(sample(0, 0, 10),)
    )
    first = told(runner.launch(opening).wait())[0]
    fork = StepPlan(
        1,
        moves=moves(DEVICE, DEVICE, (3, 9)),
        starts=(row_start(1, [*PROMPT, first], num_prompt=10, num_logprobs=0),),
        grants=grants({1: [1, 2, 9, 10, 11]}),
        chunks=(sample(1, 10, 11),),
        num_decoding=1,
    )
    results = [runner.launch(fork).wait()] + [runner.launch(StepPlan(i, num_decoding=2)).wait() for i in range(2, 8)]
    for result in results:
        assert len(set(emitted(result).values())) == 1
        assert result.logprobs[Row(0)][0].logprob == result.logprobs[Row(1)][0].logprob


def test_padding_does_not_show() -> None:
    plan = StepPlan(
        0,
        starts=(row_start(0, PROMPT, num_candidates=3),),
        grants=grants({0: [1, 2, 3]}),
        chunks=(host_driven(0, 0, 10),),
        num_padding=3,
    )
    assert_likeliest(new_runner().launch(plan).wait().candidates[Row(0)], logits_after(PROMPT), 3)


def test_steps_are_timed_in_the_null_block_and_the_shorter_of_two_counts() -> None:
    """The clock says 8 and 4 s for a decode, then 160 and 320 s for a chunk of 32 tokens."""
    stores = new_store(decoder().kv_geometry, 20, BLOCK, torch.device("cpu"))
    stores.device.fill_(7.0)
    ticks = iter([0.0, 8.0, 10.0, 14.0, 20.0, 180.0, 200.0, 520.0])
    assert time_steps(decoder(), stores, lambda: next(ticks)) == StepTimes(decode_s=4.0, token_s=5.0)
    assert (stores.device[1:] == 7.0).all() and not (stores.device[0] == 7.0).any()
