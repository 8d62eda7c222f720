"""The GPU's own clock under `quire bench`: its marks lie in the order of the work between them."""

import json

import pytest
import torch

from quire.bench.observer import CudaClock
from tests.cli.commands import Shell


def test_marks_measure_the_work_between_them() -> None:
    clock = CudaClock()
    matrix = torch.ones(1024, 1024, device="cuda")
    first = clock.mark()
    for _ in range(8):
        matrix = matrix @ matrix
    last = clock.mark()
    torch.cuda.synchronize()
    assert first.reached() and last.reached()
    assert last.seconds_since(first) > 0


def test_a_measurement_reports_how_busy_the_gpu_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = ("--model", "smollm2-135m", "--load-format", "dummy", "--device", "cuda", "--max-model-len", "256")
    said = Shell(monkeypatch, capsys)(
        "bench", "latency", *engine, "--workload", "bs8", "--scale", "0.1", "--repeats", "1", "--json"
    )
    assert said.status == 0, said.err
    [repeat] = json.loads(said.out)["repeats"]
    for window in ("gpu_busy", "gpu_busy_in_decode"):
        assert 0 < repeat[window]["share"] <= 1 and 0 <= repeat[window]["late_share"] <= 1, window
    assert all(step["device_s"] > 0 for step in repeat["steps"] if step["output_tokens"])
