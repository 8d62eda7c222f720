"""Goodput of replicas and of prefill and decode pools: which requests, the search, the report."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from quire.bench.load_client import LoadSettings
from quire.bench.service_levels import CapacityProbe, ServiceLevel, find_capacity
from quire.bench.simulated import H200_MACHINE, HTTP_OVERHEAD, simulate, sizings
from quire.bench.split_goodput import (
    KV_BYTES_PER_TOKEN,
    ClusterLoad,
    ClusterSetup,
    SplitSearch,
    halves,
    simulate_cluster,
)
from quire.bench.split_serving import ServerSetup, SplitServing, measure_split, setups_of
from quire.cli.main import app
from quire.core.errors import ConfigError
from quire.sim.cluster import LinkSpeed, PoolSizes
from quire.workload.traces import TraceRow
from tests.server.scripted_servers import SIZES

LINK = LinkSpeed(50e9, KV_BYTES_PER_TOKEN, 0.002)
ROWS = [TraceRow(0.0, 400 + 100 * number, 8) for number in range(12)]


def test_one_replica_is_the_simulated_server() -> None:
    rows = ClusterLoad(tuple(ROWS), 1.0).at(20.0)
    alone = simulate(rows, H200_MACHINE, sizings()[-1], HTTP_OVERHEAD)
    cluster = simulate_cluster(rows, ClusterSetup(PoolSizes(0, 1), sizings()[-1]), LINK)
    assert [each.ttft_s for each in cluster] == pytest.approx([each.ttft_s for each in alone])
    assert [each.tpot_s for each in cluster] == pytest.approx([each.tpot_s for each in alone])


def test_a_load_has_its_rate_and_repeats_no_prefix() -> None:
    load = ClusterLoad(tuple(row._replace(prefix_ids=(7, number)) for number, row in enumerate(ROWS)), 10.0)
    rows = load.at(3.0)
    assert 20 < len(rows) <= 30 and all(row.arrived_s < 10.0 for row in rows)
    assert [row.num_prompt for row in rows[:12]] == [row.num_prompt for row in ROWS]
    assert rows[0].prefix_ids == (7, 0) and rows[12].prefix_ids[0] != 7, "the second time they are others"
    first, second = halves(ROWS, 10.0, 0, "t")
    assert (*first.rows, *second.rows) == tuple(ROWS) and len(first.rows) == 6
    with pytest.raises(ConfigError, match="1 requests; 2 or more"):
        halves(ROWS[:1], 10.0, 0, "t")


def test_a_search_from_a_near_rate_takes_small_steps() -> None:
    def probe(scale: float) -> CapacityProbe:
        return CapacityProbe(scale, scale, 1.0 if scale <= 1.3 else 0.0)

    scales = [each.scale for each in find_capacity(probe, 1.0, 0.05, factor=1.25)]
    assert scales[:3] == pytest.approx([1.0, 1.25, 1.25 * 1.5625])
    assert max(each for each in scales if each <= 1.3) > 1.3 / 1.05


@pytest.mark.long
def test_the_ratio_that_is_chosen_is_the_best_that_was_tried() -> None:
    """Long prompts, short answers: more prefill than decode engines."""
    load = ClusterLoad(tuple(TraceRow(0.0, 6000, 4) for _ in range(8)), 2.0)
    said: list[str] = []
    search = SplitSearch(load, load, LINK, 0.3, 4, said.append)
    found = search.compare(4, ServiceLevel(2000, 100), split=True)
    assert found.split is not None and found.by_cost is not None and found.gain is not None
    tried = [each for each in found.tried if each.setup.policy is found.split.setup.policy and each.setup.sizes[0]]
    assert found.split.setup == max(tried, key=lambda each: each.rate).setup
    assert found.split.setup.sizes.num_prefill >= 2 and found.split.rate > 0
    assert len(said) == len(found.tried) + 3, "progress of each search"
    larger = search.compare(8, ServiceLevel(2000, 100), split=True)
    assert larger.tried == () and larger.split is not None, "chosen up to 4 GPUs"
    assert larger.split.setup.sizes.num_prefill == 2 * found.split.setup.sizes.num_prefill


def test_the_command_prints_a_table_a_plot_and_json(tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("num_prefill_tokens,num_decode_tokens\n" + "8000,3\n" * 8)
    plot = tmp_path / "goodput.svg"
    words = [
        "bench",
        "goodput",
        "--split",
        "--gpus",
        "2",
        "--trace",
        str(trace),
        "--seconds",
        "1",
        "--tolerance",
        "0.9",
    ]
    shown = CliRunner().invoke(app, [*words, "--plot", str(plot)])
    assert shown.exit_code == 0, shown.output
    assert "1 + 1" in shown.output and "split: by cost" in shown.output and "chosen on" in shown.output
    assert ElementTree.parse(plot).getroot().tag.endswith("svg")
    words[words.index("2")] = "1"
    printed = CliRunner().invoke(app, [*words, "--json"])
    (line,) = [line for line in printed.output.splitlines() if line.startswith("{")]
    (only,) = json.loads(line)["comparisons"]
    assert only["gpus"] == 1 and only["split"] is None and only["replicas"]["requests_per_s"] > 0


def test_real_setups_have_the_same_number_of_engines() -> None:
    assert setups_of(3) == [ServerSetup(0, 3), ServerSetup(1, 2), ServerSetup(2, 1)]
    assert ServerSetup(1, 2).arguments == ["--replicas", "2", "--prefill-engines", "1"]
    with pytest.raises(ConfigError, match="not 1; give --engines 2"):
        setups_of(1)
    refused = CliRunner().invoke(app, ["bench", "goodput", "--split", "--engines", "2", "--plot", "x.svg"])
    assert isinstance(refused.exception, ConfigError) and "leave out --engines" in refused.exception.message


@pytest.mark.long
def test_real_servers_take_turns(tmp_path: Path, default_model_path: Path) -> None:
    script = tmp_path / "script.jsonl"
    script.write_text('{"step_ms": 5}\n{"say": "on and on ", "end": false}\n')
    rows = tuple(TraceRow(0.1 * number, 700, 6) for number in range(4))
    serving = SplitServing(None, 1, rows, LoadSettings(1000, num_warm_up=1), ("--script", str(script), *SIZES))
    said: list[str] = []
    measured = measure_split(serving, setups_of(2), 2, said.append)
    assert [line.partition(": ")[2] for line in said] == [
        "2 replicas", "1 prefill + 1 decode", "1 prefill + 1 decode", "2 replicas"
    ]  # fmt: skip
    assert all(record.served and record.num_received == 6 for each in measured for one in each.rounds for record in one)
