"""Whether a prompt is split, from numbers that are added up by hand."""

import pytest

from quire.sched.cost_model import Constants, CostTable
from quire.sched.prompt_split import (
    MEASURED,
    NO_COSTS,
    DecodeLoad,
    MeasuredTransfers,
    PrefillCosts,
    PrefillLoad,
    TransferTimes,
    choose,
    prefill_costs,
)

COSTS = PrefillCosts((100, 200, 400), (0.2, 0.3, 0.6), 100, 0.05)  # seconds of the first so many tokens


def test_costs_are_read_between_the_lengths_that_an_engine_predicts() -> None:
    assert not NO_COSTS.known and COSTS.known
    assert COSTS.alone_s(0, 150) == pytest.approx(0.25)
    assert COSTS.alone_s(150, 300) == pytest.approx(0.45 - 0.25)
    assert COSTS.added_s(0, 150) == pytest.approx(0.25 - 2 * 0.05), "two chunks, in steps that others need anyway"
    assert COSTS.added_s(0, 1) == 0.0
    assert COSTS.queue_s(50) == pytest.approx(0.1)


def test_an_engine_predicts_by_its_cost_table() -> None:
    table = CostTable(Constants(0.0, 0.0, 0.001, 0.0, 0.0), largest_chunk=128)
    costs = prefill_costs(table, 500)
    assert costs.lengths == (64, 128, 256, 512) and costs.largest_chunk == 128
    assert costs.seconds == pytest.approx((0.064, 0.128, 0.256, 0.512)) and costs.step_s == pytest.approx(0.001)


def test_a_prompt_stays_unless_it_would_cost_all_requests_more_here() -> None:
    idle = PrefillLoad(COSTS, 0, 0)
    transfer = TransferTimes(copy_s=0.02, handoff_s=0.01)
    alone = choose(200, DecodeLoad(COSTS, 0, 0, 0), idle, transfer)
    assert alone == pytest.approx((0.3, 0.3 + 0.02 + 0.01)) and not alone.splits, "no request would gain"
    streams = choose(200, DecodeLoad(COSTS, 0, 0, 8), idle, transfer)
    here_s, there_s = 0.3 + 8 * (0.3 - 2 * 0.05), 0.3 + 0.01 + (1 + 8) * 0.02
    assert streams == pytest.approx((here_s, there_s)) and streams.splits
    assert f"{1000 * here_s:,.1f} ms of delay were expected here" in streams.text
    assert f"{1000 * there_s:.1f} ms by a prefill engine" in streams.text
    waiting = choose(200, DecodeLoad(COSTS, 0, 100, 0), idle, transfer)
    assert waiting.here_s == pytest.approx(0.5) and waiting.splits, "others are before it here"
    queue = choose(200, DecodeLoad(COSTS, 0, 0, 8), PrefillLoad(COSTS, 0, 1000), transfer)
    assert queue.there_s == pytest.approx(there_s + 2.0) and not queue.splits, "others are before it there"
    cached = choose(200, DecodeLoad(COSTS, 190, 0, 8), idle, transfer)
    assert not cached.splits, "little is left to compute"
    slow = choose(200, DecodeLoad(COSTS, 0, 0, 8), idle, TransferTimes(copy_s=0.5, handoff_s=0.01))
    assert not slow.splits, "the copy takes longer than it saves"


def test_transfers_count_by_their_median() -> None:
    measured = MeasuredTransfers()
    usual = measured.expected(10**9)
    assert usual.copy_s > 0 and usual.handoff_s > 0
    for number in range(MEASURED):
        times = TransferTimes(100.0, 9.0) if number % 3 == 2 else TransferTimes(0.5, 0.004)
        measured.note(10**9, times)  # every third stood still
    assert measured.expected(2 * 10**9) == pytest.approx((1.0, 0.004))
    measured.note(0, TransferTimes(0.0, 0.004))
    assert measured.expected(0) == pytest.approx((0.0, 0.004)), "blocks without bytes say nothing of the bandwidth"
