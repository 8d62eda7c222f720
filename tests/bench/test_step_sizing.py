"""Steps that are sized for the tail cost first tokens some time, and save everybody else a long wait."""

import json
from pathlib import Path

import pytest

from quire.bench.regimes import SimulatedMachine
from quire.bench.step_sizing import H200, StepSizingResult, compare, pacings
from quire.sched.batching import MOST_STRETCH, PER_DECODE
from quire.sched.cost_model import StepShape
from quire.workload.arrivals import poisson
from quire.workload.traces import sample
from tests.cli.commands import Shell

MACHINE = SimulatedMachine(num_blocks=50_000, max_model_len=16_384)
MORE = 1.1  # what a step may take beyond its target: a table that learns is not always right


@pytest.fixture(scope="module")
def ways() -> dict[str, StepSizingResult]:
    rows = poisson(sample("sharegpt")[:80], 8.0, seed=0)
    return {outcome.name: outcome for outcome in compare(rows, MACHINE, pacings())}


@pytest.mark.parametrize(
    ("shape", "measured_ms"),
    [
        (StepShape(num_rows=1, num_context=400), 3.98),
        (StepShape().with_chunk(0, 2048), 44.0),
        (StepShape().with_chunk(0, 8192), 197.5),
    ],
)
def test_the_simulated_card_takes_what_the_card_took(shape: StepShape, measured_ms: float) -> None:
    assert 1000 * H200().predict_s(shape) == pytest.approx(measured_ms, rel=0.05)


def test_a_target_is_kept_and_the_usual_one_gives_way_to_a_queue(ways: dict[str, StepSizingResult]) -> None:
    target_ms = 1000 * max(way.target_s or 0.0 for way in pacings())
    worst = {name: outcome.gaps_ms.max for name, outcome in ways.items() if outcome.gaps_ms is not None}
    decode_ms = max(target_ms / PER_DECODE, H200().predict_s(StepShape(80, 80 * 3000)) * 1000)  # all of them at once
    assert worst["kept"] < MORE * target_ms < worst["usual"]
    assert worst["usual"] < MORE * MOST_STRETCH * PER_DECODE * decode_ms < worst["none"]


def test_first_tokens_pay_for_it(ways: dict[str, StepSizingResult]) -> None:
    late = {name: outcome.first_tokens_ms.p99 for name, outcome in ways.items()}
    assert late["none"] < late["usual"] < late["kept"]
    assert late["usual"] < 3 * late["none"]


def test_the_work_is_the_same(ways: dict[str, StepSizingResult]) -> None:
    rates = [outcome.tokens_per_s for outcome in ways.values()]
    assert min(rates) > 0.9 * max(rates)


def test_the_command_says_so_to_people_and_to_programs(quire: Shell, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    times = "\n".join(f"2023-11-16 18:15:{second:02}.0,600,20" for second in range(40))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{times}\n")
    window = ("bench", "pacing", "--workload", str(trace), "--skip", "10", "--seconds", "5", "--scale", "4")
    said = quire(*window, "--json")
    told = json.loads(said.out)
    assert (said.status, told["requests"], told["scale"]) == (0, 20, 4.0)
    assert [run["name"] for run in told["runs"]] == ["none", "kept", "usual"]
    assert all(run["first_token_ms"]["p50"] > 0 for run in told["runs"])
    table = quire(*window, "--itl-target", "15")
    assert table.status == 0 and "15.0 ms, named" in table.out
    late = quire("bench", "pacing", "--workload", str(trace), "--skip", "50")
    assert late.status != 0 and "it has 39 s" in late.err


def test_a_request_beyond_the_machine_is_cut_before_its_prompt_is_drawn(quire: Shell, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"num_prefill_tokens,num_decode_tokens\n{10**15},{10**15}\n")
    told = json.loads(quire("bench", "pacing", "--workload", str(trace), "--json").out)
    assert told["requests"] == 1 and told["runs"][0]["gap_ms"] is None, "its prompt takes all but one token"
