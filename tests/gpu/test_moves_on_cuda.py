"""Moves, appended tokens, candidates and padding on the GPU, against the numpy oracle."""

import torch

from quire.core.ids import Row
from quire.core.step import AppendTokens, StepPlan
from quire.models.interface import KvGeometry
from quire.runner.kv_store import new_store
from quire.runner.warmup import measure_transfer
from tests.runner.plans import DEVICE, HOST, emitted, grants, host_driven, moves, row_start, sample, seat_of
from tests.sim.runner_pairs import RunnerPair, after, assert_same, following

PROMPT = [5, 96, 3, 41, 0, 17, 17, 88, 2, 60]


def test_blocks_are_shared_copied_swapped_and_granted_anew() -> None:
    pair = RunnerPair("cuda")
    opening = StepPlan(0, starts=(row_start(0, PROMPT),), grants=grants({0: [1, 2, 3]}), chunks=(sample(0, 0, 10),))
    assert emitted(pair.run(opening)) == {0: following(PROMPT, 1)[0]}
    fork = [*PROMPT, 7]
    pair.run(
        StepPlan(
            1,
            moves=moves(DEVICE, DEVICE, (3, 5), (5, 6), (2, 7)),
            starts=(row_start(1, fork),),
            grants=grants({1: [1, 7, 6]}),
            chunks=(sample(1, 10, 11),),
            num_decoding=1,
            num_padding=5,
        )
    )
    known = PROMPT + following(PROMPT, 2)
    other = [9] * 11
    out = StepPlan(
        2,
        moves=moves(DEVICE, HOST, (1, 8), (2, 6), (3, 7)),
        releases=(Row(0),),
        starts=(seat_of(7, 0, other),),
        grants=grants({0: [3, 9, 2]}),
        chunks=(sample(0, 0, 11),),
        num_decoding=1,
    )
    assert emitted(pair.run(out)) == {0: following(other, 1)[0], 1: following(fork, 2)[1]}
    back = StepPlan(
        3,
        moves=moves(HOST, DEVICE, (7, 12), (8, 10), (6, 11)),
        starts=(seat_of(0, 2, known, num_prompt=10),),
        grants=grants({2: [10, 11, 12], 1: [13]}),
        chunks=(sample(2, 11, 12),),
        num_decoding=2,
    )
    assert emitted(pair.run(back))[2] == following(PROMPT, 3)[2]


def test_a_host_driven_row_gets_tokens_and_returns_exact_logprobs() -> None:
    pair = RunnerPair("cuda")
    opening = StepPlan(
        0,
        starts=(row_start(0, PROMPT, num_candidates=4),),
        grants=grants({0: [1, 2, 3]}),
        chunks=(host_driven(0, 0, 10),),
    )
    assert_same(pair.run(opening).candidates[Row(0)], after(PROMPT, 4))
    told = pair.run(StepPlan(1, appends=(AppendTokens(Row(0), (8,)),), chunks=(host_driven(0, 10, 11),)))
    assert_same(told.candidates[Row(0)], after([*PROMPT, 8], 4))


def test_a_copy_costs_something_and_the_host_is_pinned() -> None:
    geometry = KvGeometry(num_layers=4, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    stores = new_store(geometry, 16, 16, torch.device("cuda"), num_host_blocks=16)
    assert stores.host is not None and stores.host.is_pinned()
    assert measure_transfer(stores) > 0
