"""An ITL target delays first tokens and shortens the longest gaps between tokens."""

import json
from pathlib import Path

import pytest

from quire.bench.service_levels import LoadSummary, Percentiles, summarize
from quire.bench.simulated import H200, H200_MACHINE, simulate, sizings
from quire.sched.cost_model import StepShape
from quire.sched.pacing import MAX_STRETCH, PER_DECODE
from quire.workload.traces import poisson, sample
from tests.cli.commands import Shell

MORE = 1.1  # tolerance: the learned cost table is not exact


@pytest.fixture(scope="module")
def results() -> dict[str, LoadSummary]:
    rows = poisson(sample("sharegpt")[:80], 8.0, seed=0)
    return {sizing.name: summarize(simulate(rows, H200_MACHINE, sizing)) for sizing in sizings()}


def known(times: Percentiles | None) -> Percentiles:
    assert times is not None
    return times


@pytest.mark.parametrize(
    ("shape", "least_ms", "most_ms"),
    [
        (StepShape(num_rows=1, num_context=400), 3.8, 4.0),
        (StepShape().with_chunk(0, 2048), 44.0, 51.0),
        (StepShape().with_chunk(0, 8192), 197.5, 210.0),
    ],
)
def test_the_simulated_gpu_takes_the_measured_times(shape: StepShape, least_ms: float, most_ms: float) -> None:
    """Of a few steps behind each other, and of ten seconds of such steps."""
    assert least_ms <= 1000 * H200().predict_s(shape) <= most_ms


def test_a_target_is_kept_and_the_default_one_grows_with_load_and_queue(results: dict[str, LoadSummary]) -> None:
    target_ms = 1000 * max(sizing.target_s or 0.0 for sizing in sizings())
    worst = {name: known(outcome.itl_ms).max for name, outcome in results.items()}
    decode_ms = max(target_ms / PER_DECODE, H200().predict_s(StepShape(80, 80 * 3000)) * 1000)  # all requests at once
    assert worst["kept"] < MORE * target_ms < worst["usual"]
    assert worst["usual"] < MORE * MAX_STRETCH * PER_DECODE * decode_ms and worst["usual"] < worst["none"]


def test_first_tokens_come_later_with_a_target_that_is_kept(results: dict[str, LoadSummary]) -> None:
    late = {name: known(outcome.ttft_ms).p99 for name, outcome in results.items()}
    assert late["usual"] < late["kept"]
    assert late["usual"] < 1.3 * late["none"]


def test_the_throughput_is_nearly_the_same(results: dict[str, LoadSummary]) -> None:
    rates = [outcome.output_tokens_per_s for outcome in results.values()]
    assert min(rates) > 0.9 * max(rates)


def test_the_command_as_a_table_and_as_json(quire: Shell, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    times = "\n".join(f"2023-11-16 18:15:{second:02}.0,600,20" for second in range(40))
    trace.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{times}\n")
    window = ("bench", "pacing", "--workload", str(trace), "--skip", "10", "--seconds", "5", "--scale", "4")
    result = quire(*window, "--json")
    report = json.loads(result.out)
    assert (result.status, report["requests"], report["scale"]) == (0, 20, 4.0)
    assert [run["name"] for run in report["runs"]] == ["none", "kept", "usual"]
    assert all(run["first_token_ms"]["p50"] > 0 for run in report["runs"])
    table = quire(*window, "--itl-target", "15", "--ttft-target", "60")
    assert table.status == 0 and "15.0 ms, named" in table.out
    late = quire("bench", "pacing", "--workload", str(trace), "--skip", "50")
    assert late.status != 0 and "it has 39 s" in late.err


def test_a_request_beyond_the_context_is_cut_before_its_prompt_is_drawn(quire: Shell, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(f"num_prefill_tokens,num_decode_tokens\n{10**15},{10**15}\n")
    report = json.loads(quire("bench", "pacing", "--workload", str(trace), "--json").out)
    assert report["requests"] == 1 and report["runs"][0]["gap_ms"] is None, "its prompt takes all but one token"
