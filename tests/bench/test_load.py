"""`quire bench serve` and `capacity`: real HTTP against a server with known text, figures from records, simulation."""

import json
import xml.etree.ElementTree as Tree
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.bench.load_client import _record, _Response
from quire.bench.service_levels import (
    CapacityProbe,
    ServedRequest,
    ServiceLevel,
    TokenArrival,
    attainment,
    find_capacity,
    parse_level,
    plain,
    summarize,
    violations,
)
from quire.core.errors import ConfigError
from quire.workload.traces import TraceRow, TraceWindow, sample
from tests.cli.commands import Shell
from tests.server.local_server import LocalServer, local_server

ENDLESS = ({"step_ms": 1}, {"say": "on and on and ", "end": False})
TIMES_S = [0.025 * number for number in range(8)]
SIZES = ("--max-model-len", "4k", "--kv-cache-memory", "1GiB")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    with local_server(tmp_path_factory.mktemp("script"), ENDLESS, *SIZES) as running:
        yield running


def trace(folder: Path, *rows: tuple[int, int, int, list[int]]) -> str:
    """A trace file: milliseconds, prompt, output, prefix ids."""
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    file = folder / "trace.jsonl"
    file.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    return str(file)


def test_every_request_is_sent_at_its_time_and_has_its_forced_length(
    quire: Shell, server: LocalServer, tmp_path: Path
) -> None:
    file = trace(tmp_path, *((100 * number, 20 + number, 2 + number, []) for number in range(8)))
    events, plot = tmp_path / "events.jsonl", tmp_path / "plot.svg"
    done = quire("bench", "serve", "--url", server.url, "--trace", file, "--scale", "4", "--vocab-size", "4000",
                 "--events", str(events), "--plot", str(plot), "--level", "60000/60000", "--json")  # fmt: skip
    assert done.status == 0, done.err
    report = json.loads(done.out)
    assert (report["requests"], report["failed"], report["short"]) == (8, 0, 0)
    assert report["output_tokens"] == sum(range(2, 10))
    assert report["levels"] == [
        {"level": "60000/60000", "met_share": 1.0, "goodput_per_s": pytest.approx(report["requests_per_s"], rel=1e-3)}
    ]
    facts, *lines = [json.loads(line) for line in events.read_text().splitlines()]
    assert facts["scale"] == 4.0 and [line["scheduled_s"] for line in lines] == pytest.approx(TIMES_S)
    assert all(line["sent_s"] >= line["scheduled_s"] and line["error"] is None for line in lines)
    assert [sum(count for _, count in line["arrivals"]) for line in lines] == [2 + number for number in range(8)]
    assert len(Tree.fromstring(plot.read_text()).findall("{http://www.w3.org/2000/svg}polyline")) == 3
    table = quire("bench", "serve", "--url", server.url.removeprefix("http://") + "/v1", "--trace", file)
    assert table.status == 0 and "TTFT" in table.out and "goodput" in table.out


def test_equal_prefix_ids_are_equal_tokens(quire: Shell, server: LocalServer, tmp_path: Path) -> None:
    file = trace(tmp_path, (0, 1030, 2, [7, 8, 9]), (2000, 1040, 2, [7, 8, 10]), (2000, 1030, 2, [20, 21, 22]))
    window = ("--url", server.url, "--trace", file, "--seed", "5", "--scale", "4", "--vocab-size", "4000")
    report = json.loads(quire("bench", "serve", *window, "--json").out)
    assert report["cached_tokens"] == 1024


def test_a_refused_request_is_a_failure_with_its_reason(quire: Shell, server: LocalServer, tmp_path: Path) -> None:
    file = trace(tmp_path, (0, 5000, 2, []), (10, 10, 2, []))
    asked = ("bench", "serve", "--url", server.url, "--trace", file, "--vocab-size", "4000", "--json")
    done = quire(*asked)
    report = json.loads(done.out)
    assert (done.status, report["requests"], report["failed"]) == (0, 2, 1)
    assert report["levels"][1]["met_share"] == 0.5 and "status 400" in report["errors"][0]
    fits = json.loads(quire(*asked, "--max-prompt", "100").out)
    assert (fits["requests"], fits["failed"]) == (1, 0)
    none = quire(*asked, "--model", "no-such-model")
    assert none.status != 0 and "No request was served" in none.err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--url"),
        (("--simulate", "--url", "http://127.0.0.1:1"), "--simulate"),
        (("--url", "http://127.0.0.1:9"), "No server answers at http://127.0.0.1:9/v1/models: Connection refused."),
        (("--url", "ftp://here"), "not an address"),
        (("--url", "http://here:port"), "not an address"),
        (("--simulate", "--scale", "2", "--rate", "2"), "not both"),
        (("--simulate", "--scale", "0"), "--scale"),
        (("--url", "http://127.0.0.1:1", "--itl-target", "9"), "--simulate"),
        (("--simulate", "--level", "500"), "TTFT/TPOT"),
        (("--simulate", "--level", "0/30"), "TTFT/TPOT"),
        (("--simulate", "--trace", "nowhere"), "nowhere"),
        (("--simulate", "--trace", "nowhere.csv"), "cannot be read"),
        (("--simulate", "--from", "9000000"), "Start earlier"),
        (("--simulate", "--max-prompt", "1"), "more than 1 tokens"),
    ],
)
def test_invalid_options_are_named(quire: Shell, options: tuple[str, ...], words: str) -> None:
    done = quire("bench", "serve", *options)
    assert done.status != 0 and "Traceback" not in done.err
    assert words in " ".join(done.err.replace("│", " ").split())


def test_the_simulated_form_has_the_same_report(quire: Shell, server: LocalServer, tmp_path: Path) -> None:
    file = trace(tmp_path, (0, 1030, 3, [7, 8, 9]), (500, 1040, 3, [7, 8, 10]))
    asked = ("bench", "serve", "--trace", file, "--vocab-size", "4000", "--json")
    simulated = json.loads(quire(*asked, "--simulate").out)
    assert simulated.keys() == json.loads(quire(*asked, "--url", server.url).out).keys()
    assert simulated["cached_tokens"] == 1024 and simulated["output_tokens"] == 6
    assert simulated == json.loads(quire(*asked, "--simulate").out)
    slow = json.loads(quire(*asked, "--simulate", "--itl-target", "6").out)
    assert slow["ttft_ms"]["max"] >= simulated["ttft_ms"]["max"] and slow["itl_target_s"] == 0.006


@pytest.mark.long  # 5 CPU seconds; the search is tested by itself
def test_capacity_of_the_simulated_server(quire: Shell) -> None:
    asked = ("bench", "capacity", "--simulate", "--trace", "sharegpt", "--rate", "8", "--seconds", "4")
    report = json.loads(quire(*asked, "--tolerance", "0.5", "--level", "2000/100", "--json").out)
    [found] = report["levels"]
    assert found["bracketed"] and found["capacity_per_s"] > 0
    held = [probe["scale"] for probe in found["probes"] if probe["met_share"] >= 0.99]
    assert found["scale"] == pytest.approx(max(held), abs=1e-4) and len(held) < len(found["probes"])
    table = quire(*asked, "--tolerance", "1", "--level", "1/1")
    assert table.status == 0 and "none of the tried rates" in table.out
    assert "had their first token late" in table.out


def test_a_level_that_requests_alone_miss_ends_the_search_with_the_reason(quire: Shell, tmp_path: Path) -> None:
    """The search goes down to the rate with 20 requests: one of them alone would meet any level."""
    longer = [(500 * number, 60_000 if number in (5, 15) else 500, 3, [number]) for number in range(70)]
    file = trace(tmp_path, *longer)
    asked = ("bench", "capacity", "--simulate", "--trace", file, "--seconds", "35", "--level", "1000/100")
    [found] = json.loads(quire(*asked, "--json").out)["levels"]
    scales = [each["scale"] for each in found["probes"]]
    assert found["capacity_per_s"] is None and scales == pytest.approx([1.0, 0.5, 20 / 70])
    assert found["missed"]["of"] == 20 and found["missed"]["too_long"] == 60_000
    table = " ".join(quire(*asked).out.split())
    assert "So did all prompts of 60,000 tokens and more; without them: --max-prompt 59999." in table
    assert "fewer than some 20 requests" in table


# Figures.


def record(*arrivals: tuple[float, int], sent_s: float = 0.0, error: str | None = None) -> ServedRequest:
    return ServedRequest(0, sent_s, sent_s, 10, 4, tuple(TokenArrival(*each) for each in arrivals), error=error)


def test_tokens_that_come_together_share_their_gap() -> None:
    made = record((1.0, 1), (1.3, 3), (1.4, 1), sent_s=0.5)
    assert made.gaps_s() == pytest.approx([0.1, 0.1, 0.1, 0.1])
    assert (made.ttft_s, made.tpot_s, made.e2e_s) == pytest.approx((0.5, 0.1, 0.9))
    assert record((1.0, 1)).tpot_s is None


def test_goodput_counts_requests_that_meet_both_limits() -> None:
    level = ServiceLevel(500, 100)
    fast, late, slow = record((0.5, 1), (0.6, 1)), record((0.51, 1)), record((0.1, 1), (0.3, 1))
    failed = record((0.1, 1), error="lost")
    records = [fast, late, slow, failed]
    assert [level.is_met_by(each) for each in records] == [True, False, False, False]
    assert attainment(records, level) == 0.25
    summary = summarize(records)
    assert (summary.failed, summary.short, summary.errors) == (1, 3, ("lost",))
    assert plain(summary, records, [level])["levels"] == [
        {"level": "500/100", "met_share": 0.25, "goodput_per_s": 0.25 * summary.requests_per_s}
    ]


def test_why_a_level_was_missed() -> None:
    level = ServiceLevel(500, 100)
    slow, failed, met = record((0.1, 1), (0.4, 1)), record((0.1, 1), error="lost"), record((0.1, 1))
    late = [record((0.6, 1))._replace(num_prompt=length) for length in (70, 30, 7)]
    found = violations([*late, slow, failed, met], level)
    assert found[:5] == (5, 6, 1, 3, 1) and found[5:7] == pytest.approx((600, 300))
    assert found.too_long == 30, "one of 10 tokens was in time, later than one of 7"
    assert found.reason() == (
        "5 of 6 requests missed it at the lowest rate: 1 failed; 3 had their first token late, after up to 600 ms; "
        "1 had their tokens late, up to 300.0 ms apart. So did all prompts of 30 tokens and more; without them: "
        "--max-prompt 29."
    )
    assert violations(late, level).too_long is None, "without them there is no request"
    assert violations([failed], level).reason().endswith("at the lowest rate: 1 failed.")


def test_a_level_is_two_positive_numbers() -> None:
    assert parse_level("500/30") == ServiceLevel(500, 30) and parse_level("0.5/30.25").tpot_ms == 30.25
    for text in ("500", "a/b", "-1/3", "0/1", "1/0", "1/2/3", "nan/1", ""):
        with pytest.raises(ConfigError):
            parse_level(text)


@pytest.mark.parametrize("limit", [0.03, 0.4, 1.0, 7.3, 900.0])
def test_capacity_is_found_within_the_tolerance(limit: float) -> None:
    probes = find_capacity(lambda scale: CapacityProbe(scale, scale, float(scale <= limit)), 1.0, 0.05)
    best = max(probe.scale for probe in probes if probe.holds)
    assert limit / 1.05 <= best <= limit


def test_the_lowest_rate_is_tried_before_the_search_ends() -> None:
    def probe(scale: float) -> CapacityProbe:
        return CapacityProbe(scale, scale, float(scale <= 0.75))

    assert find_capacity(probe, 1.0, 0.05, lowest=0.7)[1].scale == 0.7
    best = max(probe.scale for probe in find_capacity(probe, 1.0, 0.05, lowest=0.7) if probe.holds)
    assert 0.75 / 1.05 <= best <= 0.75
    assert [each.scale for each in find_capacity(probe, 1.0, 0.05, lowest=0.8)] == [1.0, 0.8]
    assert len(find_capacity(probe, 1.0, 0.05, lowest=1.0)) == 1


def test_a_search_without_an_end_stops() -> None:
    assert not any(p.holds for p in find_capacity(lambda scale: CapacityProbe(scale, scale, 0.0), 1.0, 0.05))
    assert all(p.holds for p in find_capacity(lambda scale: CapacityProbe(scale, scale, 1.0), 1.0, 0.05))


# Responses, whatever their pieces.

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
COUNTED = (
    b'data: {"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}\n\n',
    b'data: {"choices":[{"text":"\\"completion_tokens\\":9"}],"usage":{"completion_tokens":3}}\n\n',
    b'data: {"choices":[],"usage":{"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}\n\n',
    b"data: [DONE]\n\n",
)
UNCOUNTED = (
    b'data: {"choices": [{"text": "a"}]}\n\n',
    b'data: {"choices": [{"text": "b"}]}\n\n',
    b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\n',
    b"data: [DONE]\n\n",
)


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def read(pieces: list[bytes]) -> ServedRequest:
    timed = [(float(number), data) for number, data in enumerate(pieces)]
    return _record(0, TraceRow(0.0, 4, 3), _Response(0.0, 99.0, timed, None))


@pytest.mark.parametrize("events", [COUNTED, UNCOUNTED])
def test_an_event_has_the_time_of_the_piece_that_ends_it(events: tuple[bytes, ...]) -> None:
    whole = [HEAD, *(b"%x\r\n%s\r\n" % (len(event), event) for event in events), b"0\r\n\r\n"]
    assert list(read(whole).arrivals) == [(1.0, 1), (2.0, 2)]
    body = b"".join(events)
    plain_body = [b"HTTP/1.1 200 OK\r\n\r\n", body]
    assert read(plain_body).num_received == 3 and read(plain_body).error is None
    cut = [body[start : start + 7] for start in range(0, len(body), 7)]  # chunks that end within events
    stream = HEAD + chunked(*cut)
    bytewise = read([stream[place : place + 1] for place in range(len(stream))])
    ends = [int(at_s) for at_s, _ in bytewise.arrivals]
    assert [tokens for _, tokens in bytewise.arrivals] == [1, 2] and bytewise.error is None
    assert [stream[: end + 1].replace(b"\r\n", b"").count(b"data") for end in ends] == [1, 2]


def test_a_cut_or_damaged_response_is_an_error() -> None:
    assert read([HEAD + chunked(*COUNTED[:2])]).error == "the stream ended without [DONE]"
    assert "damaged" in str(read([HEAD + b"zz\r\ndata"]).error)
    assert read([b"HTTP/1.1 503 Busy\r\n\r\ncome back"]).error == "status 503: come back"
    failing = read([HEAD + chunked(COUNTED[0], b'data: {"error":{"message":"lost"}}\n\n')])
    assert failing.error is not None and "lost" in failing.error and not failing.served
    assert read([]).error == "status 0: "


def test_a_window_of_a_trace() -> None:
    rows = [TraceRow(float(second), 100 * second + 1, 1) for second in range(10)]
    chosen = TraceWindow(from_s=2, seconds=2, scale=2, max_prompt=500).select(rows, "it")
    assert [(row.arrived_s, row.num_prompt) for row in chosen] == [(0.0, 201), (0.5, 301), (1.0, 401)]
    drawn = TraceWindow(seconds=1, rate=50.0).select(rows, "it")
    assert 0 < len(drawn) <= 10 and drawn[0].arrived_s > 0
    stall = TraceWindow(seconds=8).select(sample("stall"), "stall")
    assert [row.num_prompt for row in stall] == [256] * 32 + [8192] * 2
