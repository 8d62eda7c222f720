"""`quire bench latency --profile`: the parts add up to the step, and the floor follows from bytes and bandwidth."""

import json
from pathlib import Path

import pytest
import torch

from quire.bench.throughput import StepProfile, measure_read_bandwidth
from tests.bench.test_engine_bench import ENGINE
from tests.cli.commands import SMALL, Shell
from tests.kernels.cpu_kernels import needs_native

PROFILE = ("bench", "latency", "--profile", "--device", "cpu", "--repeats", "1")


@pytest.fixture
def with_native(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """With the kernels that a user has."""
    return Shell(monkeypatch, capsys)


@needs_native
def test_the_parts_add_up_to_the_step(with_native: Shell, shallow_default: Path) -> None:
    result = with_native(*PROFILE, *SMALL, "--json")
    assert result.status == 0, result.err
    report = json.loads(result.out)
    parts = [report[f"{name}_ms"] for name in ("linear", "attention", "other", "rest")]
    assert report["num_steps"] == 127, "128 tokens, the first of which comes with the prompt"
    assert sum(parts) == pytest.approx(report["step_ms"]) and min(parts) > 0
    assert report["times_floor"] == pytest.approx(report["step_ms"] / report["floor_ms"])
    assert report["floor_ms"] == pytest.approx(1000 * report["weight_bytes"] / report["read_bytes_per_s"])
    vectors = 4 * 576 * (2 * 2 + 1)  # float32 norms of two layers and the last one, which are no matrices
    assert report["weight_bytes"] == report["settings"]["memory"]["weights"] - vectors


@pytest.mark.long  # 3 s; the other test has its figures
@needs_native
def test_a_table_has_every_part(with_native: Shell, shallow_default: Path) -> None:
    result = with_native(*PROFILE, *SMALL)
    assert result.status == 0, result.err
    for words in ("linear layers and head", "attention", "other native work", "Python, scheduler", "× it", "GB/s"):
        assert words in result.out


def test_other_kernels_are_refused(quire: Shell) -> None:
    result = quire(*PROFILE, *ENGINE)
    assert result.status == 2 and "--profile needs the native CPU kernels, and here is: requested by name" in result.err


def test_the_floor_is_bytes_by_bandwidth() -> None:
    profile = StepProfile(10, 6.0, 3.0, 1.0, 0.5, 1.5, weight_bytes=60_000_000, read_bytes_per_s=20e9)
    assert (profile.floor_ms, profile.times_floor) == (3.0, 2.0)


def test_a_bandwidth_is_measured_and_torch_keeps_its_threads() -> None:
    before = torch.get_num_threads()
    assert measure_read_bandwidth(2) > 0
    assert torch.get_num_threads() == before
