"""`quire check`, `models`, `doctor` and the sizes of options: their output, as text and as JSON."""

import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from quire.cli import doctor
from quire.cli.options import Size
from quire.cli.serve import chat_support
from quire.core.sampling import SamplingParams
from quire.kernels.attention_backends import USUAL_NEEDS
from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import KernelChoice
from quire.server.context import ServedModel
from quire.sim.check.check import VOCAB_SIZE, Scenario
from quire.sim.runners import OracleRunner
from tests.cli.commands import Shell


def test_check_ends_with_one_json_object(quire: Shell) -> None:
    result = quire("check", "--steps", "600", "--seed", "5")
    summary = json.loads(result.out.splitlines()[-1])
    assert result.status == 0
    assert summary["steps"] >= 600  # the last scenario runs to its end
    assert (summary["violations"], summary["seed"]) == (0, 5)


def test_check_fails_when_an_invariant_is_violated(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong_oracle(scenario: Scenario) -> OracleRunner:
        return OracleRunner(scenario.num_blocks, scenario.block_size, VOCAB_SIZE - 1)

    monkeypatch.setattr("quire.cli.check.numpy_oracle", wrong_oracle)
    result = quire("check", "--steps", "300")
    assert result.status == 1
    assert json.loads(result.out.splitlines()[-1])["violations"] > 0
    assert "trial seed" in result.err


def test_check_on_a_gpu_says_that_there_is_none(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = quire("check", "--runner", "cuda", "--steps", "300")
    assert result.status == 2 and "use --runner torch" in result.err and result.out == ""


def test_models_lists_what_is_not_here_yet(quire: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("a folder whose name alone is far wider than any terminal " * 3).strip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(deep))
    listed = quire("list")
    [row] = [line for line in listed.out.splitlines() if line.startswith("smollm2-135m-instruct (default)")]
    assert "absent" in row and str(deep) in row, "a row is one line where there is no terminal"
    assert "quire pull NAME" in listed.out
    [entry] = map(json.loads, quire("list", "--json").out.splitlines())
    assert (entry["name"], entry["state"]) == ("smollm2-135m-instruct", "absent")
    assert quire("show", "--verify").status == 2
    absent = quire("show")
    assert absent.status == 2 and "quire pull smollm2-135m-instruct brings it here" in absent.err


def test_pull_prints_the_path_show_the_facts_and_verify_the_result(quire: Shell, default_model_path: Path) -> None:
    assert quire("pull").out == f"{default_model_path}\n"
    assert quire("show", "--verify").out == "smollm2-135m-instruct: the checksum is right.\n"
    facts = json.loads(quire("show", "--json").out)
    assert (facts["family"], facts["layers"], facts["format"], facts["license"]) == ("llama", 30, "GGUF", "Apache-2.0")
    assert facts["parameters"] == 134_515_008 and "tools: " in facts["chat"]
    assert "134,515,008" in quire("show").out


def test_rm_deletes_what_is_listed_and_nothing_else(
    quire: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, default_model_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "quire" / "models"
    folder.mkdir(parents=True)
    (folder / "mine.gguf").write_bytes(b"1234")
    (folder / "theirs").mkdir()
    (folder / "theirs" / "config.json").write_bytes(b"{}")
    (folder / default_model_path.name).symlink_to(default_model_path)
    unknown = quire("rm", "mine", "their")
    assert unknown.status == 2 and "Did you mean theirs?" in unknown.err and (folder / "mine.gguf").exists()
    assert quire("rm", "Mine", "theirs", "smollm2").out.splitlines() == [
        "removed mine, 4 B", "removed theirs, 2 B", "removed smollm2-135m-instruct, 94 MiB",
    ]  # fmt: skip
    assert list(folder.iterdir()) == [] and default_model_path.exists()


def test_doctor_advises_in_full(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec

    def without_uvicorn(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "uvicorn" else original(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_uvicorn)
    result = quire("doctor")
    assert result.status == 0
    [line] = [line for line in result.out.splitlines() if "uvicorn " in line and "missing" in line]
    assert line.startswith("!") and 'pip install "quire[serve]"' in line
    findings = json.loads(quire("doctor", "--json").out)
    assert findings["uvicorn"]["advice"] == 'pip install "quire[serve]"'
    assert {"torch", "device", "memory", "kernels", "default model"} <= findings.keys()


def test_doctor_shows_the_attention_backends_and_reasons(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = KernelChoice(ReferenceKernels(), "for a test", attention=("decodes by quire", "fa3 not: it needs a GPU"))
    given: list[object] = []
    monkeypatch.setattr(doctor, "select_kernels", lambda *arguments: given.append(arguments) or chosen)
    assert json.loads(quire("doctor", "--json").out)["attention"]["found"] == " · ".join(chosen.attention)
    assert given[0][1:] == (USUAL_NEEDS,), "the default needs are tried"


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("32k", 32 * 1024), ("32K", 32 * 1024), ("1.5k", 1536), ("auto", None)],
)
def test_a_length_may_have_a_unit(text: str, number: int | None) -> None:
    assert Size(binary_k=True, derived=True).convert(text, None, None) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("2GiB", 2 << 30), ("2gib", 2 << 30), ("500MB", 500_000_000), ("64MiB", 64 << 20), ("7", 7), ("0.5 GiB", 1 << 29)],
)
def test_a_memory_size_may_have_a_unit(text: str, number: int) -> None:
    assert Size().convert(text, None, None) == number


def test_a_broken_chat_template_of_the_model_is_reported_at_the_start() -> None:
    def support(template: str | None) -> str:
        return chat_support(ServedModel("m", None, template, SamplingParams(), 1024, 100, 0))

    assert support(None) == "no chat template: prompts only"
    assert support("{{ messages }}\n{% if %}").startswith(
        "prompts only: the model's chat template cannot be used: line 2 is not valid: "
    )
    assert (
        support("{{ messages }}") == ServedModel("m", None, "", SamplingParams(), 1024, 100, 0).model_format.description
    )
