"""Each batching regime on the same requests."""

from dataclasses import replace

import pytest

from quire.bench.simulated import RegimeResult, SimulatedMachine, arrivals, compare_overcommits, compare_regimes
from quire.sched.policy import PREFIX
from quire.workload.traces import poisson, sample

MACHINE = SimulatedMachine(num_blocks=4096, max_rows=64)


@pytest.fixture(scope="module")
def regimes() -> dict[str, RegimeResult]:
    work = arrivals(poisson(sample("sharegpt")[:64], 64.0, seed=0), MACHINE)
    return {outcome.name: outcome for outcome in compare_regimes(work, MACHINE)}


def test_contiguous_regimes_waste_most_of_their_reservation_and_paged_ones_little(
    regimes: dict[str, RegimeResult],
) -> None:
    waste = {name: outcome.account.waste_reserved for name, outcome in regimes.items()}
    assert all(0.6 < waste[name] < 0.8 for name in ("static", "dynamic", "continuous"))
    assert all(regimes[name].account.waste_held < 0.02 for name in ("paged", "chunked", "prefix"))
    assert all(waste[name] < 0.32 for name in ("paged", "chunked", "prefix")), "hedge reserves too much"


def test_only_static_batches_are_padded(regimes: dict[str, RegimeResult]) -> None:
    padded = {name for name, outcome in regimes.items() if outcome.account.padding}
    assert padded == {"static", "dynamic"}
    assert regimes["static"].account.padding_share > 0.3


def test_each_regime_is_no_slower_than_the_one_before(regimes: dict[str, RegimeResult]) -> None:
    speed = {name: outcome.tokens_per_s for name, outcome in regimes.items()}
    assert speed["continuous"] > 1.5 * speed["static"]
    assert speed["paged"] > 1.05 * speed["continuous"]
    assert speed["prefix"] >= 0.98 * speed["chunked"] >= 0.95 * speed["paged"]


def test_chunks_bound_the_longest_step(regimes: dict[str, RegimeResult]) -> None:
    assert regimes["chunked"].account.longest_step_s < 0.7 * regimes["paged"].account.longest_step_s


def test_all_regimes_generate_the_same_number_of_tokens(regimes: dict[str, RegimeResult]) -> None:
    assert len({outcome.num_output for outcome in regimes.values()}) == 1


def test_shared_prompts_are_computed_once() -> None:
    machine = replace(MACHINE, num_blocks=16_384)
    work = arrivals(poisson(sample("mooncake")[:40], 8.0, seed=0), machine)
    outcomes = {outcome.name: outcome for outcome in compare_regimes(work, machine)}
    assert outcomes["prefix"].cached_share > 0.35
    assert outcomes["prefix"].account.tokens < 0.7 * outcomes["chunked"].account.tokens


@pytest.mark.long  # 7 CPU seconds; tests/sched has the overcommit policies one by one
def test_overcommit_trades_preemptions_for_a_fuller_batch() -> None:
    work = arrivals(sample("sharegpt")[:96], replace(MACHINE, max_rows=32))
    never, hedge, optimistic = compare_overcommits(work, replace(MACHINE, max_rows=32), PREFIX)
    assert never.preemptions == 0
    assert never.account.mean_batch < hedge.account.mean_batch < 1.05 * optimistic.account.mean_batch
    assert hedge.preemptions < optimistic.preemptions
