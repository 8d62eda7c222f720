"""`quire bench quality`: float32 agrees with itself, coarser weights agree less, and the figures are what they say."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.bench.quality import all_logits, compare_logits
from quire.models.decoder import Decoder
from tests.cli.commands import Shell
from tests.kernels.cpu_kernels import native_kernels, needs_native
from tests.models.families import FAMILIES, build
from tests.models.running import in_chunks, run

pytestmark = needs_native


@pytest.fixture
def quire(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    """With the kernels that a user has: their forms of the weights are what is measured."""
    return Shell(monkeypatch, capsys)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("A quire is a gathering of pages; a page that was spoilt could be cut out and replaced. " * 4)
    return path


def measured(quire: Shell, text: Path, *forms: str) -> dict[str, Any]:
    options = [word for form in forms for word in ("--ours", form)]
    result = quire("bench", "quality", "--text", str(text), "--positions", "50", "--window", "20", *options, "--json")
    assert result.status == 0, result.err
    report = json.loads(result.out)
    assert isinstance(report, dict)
    return report


def test_float32_agrees_with_itself_and_other_forms_less(shallow_default: Path, quire: Shell, text: Path) -> None:
    report = measured(quire, text, "dtype=float32", "quantization=none,dtype=bfloat16", "")
    exact, rounded, stored = report["forms"]
    assert report["text"] == "text.txt" and report["window"] == 20
    assert [form["num_positions"] for form in (exact, rounded, stored)] == [50] * 3
    assert (exact["agreement"], exact["mean_kl"], exact["worst_gap"]) == (1.0, pytest.approx(0, abs=1e-7), 0)
    assert 0 < stored["mean_kl"] < 0.1 * rounded["mean_kl"], "the file's own values, and activations of 16 bits"
    assert all(form["worst_kl"] >= form["mean_kl"] for form in (rounded, stored))
    assert "as the file stores them" in stored["weights"] and "bfloat16, from" in rounded["weights"]


def test_a_table_names_the_settings(shallow_default: Path, quire: Shell, text: Path) -> None:
    result = quire("bench", "quality", "--text", str(text), "--positions", "8", "--ours", "", "--threads", "1")
    assert result.status == 0, result.err
    assert "8 tokens of text.txt" in result.out and "│ default" in result.out
    assert "as the file stores them" in result.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ours", "quantization=int7"), "quantization must be one of auto, none, int8, int4"),
        (("--ours", "int8"), "write NAME=VALUE"),
        (("--model", "tiny", "--ours", ""), "There is no model 'tiny'"),
    ],
)
def test_a_mistake_is_refused(options: tuple[str, ...], words: str, quire: Shell) -> None:
    result = quire("bench", "quality", *options)
    assert result.status == 2 and words in result.err


def test_an_empty_text_is_refused(quire: Shell, shallow_default: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    result = quire("bench", "quality", "--text", str(tmp_path / "empty.txt"))
    assert result.status == 2 and "empty.txt has 0 tokens" in result.err


def test_the_logits_are_those_of_a_model_run_step_by_step() -> None:
    twin, ids = build(FAMILIES[0]), [(7 * i + 3) % 90 for i in range(300)]
    model = Decoder(twin.spec, twin.weights, native_kernels(), len(ids))
    [expected] = run(model, [ids], in_chunks([len(ids)], 70))
    assert torch.equal(all_logits(model, ids), expected), "results do not depend on the batch"


def test_divergence_and_gap_of_distributions_worked_out_by_hand() -> None:
    exact = torch.tensor([[0.75, 0.25], [0.5, 0.5]]).log()
    other = torch.tensor([[0.25, 0.75], [0.5, 0.5]]).log()
    kl, gaps = compare_logits(exact, other)
    assert kl.tolist() == pytest.approx([0.5 * torch.tensor(3.0).log().item(), 0.0], abs=1e-6)
    assert gaps.tolist() == pytest.approx([torch.tensor(3.0).log().item(), 0.0], abs=1e-6)
