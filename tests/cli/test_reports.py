"""`quire check`, `models`, `doctor` and the sizes of options: what they print, for people and for programs."""

import importlib.util
import json
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from quire.cli import doctor
from quire.cli.options import Size
from quire.cli.serve import speech_of
from quire.core.sampling import SamplingParams
from quire.kernels.attention_backends import USUAL_NEEDS
from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import KernelChoice
from quire.server.context import ServedModel
from quire.sim.check.check import VOCAB_SIZE, World
from quire.sim.runners import OracleRunner
from tests.cli.commands import Shell


def test_check_ends_with_one_json_object(quire: Shell) -> None:
    said = quire("check", "--steps", "3000", "--seed", "5")
    summary = json.loads(said.out.splitlines()[-1])
    assert said.status == 0
    assert summary["steps"] >= 3000  # the last world runs to its end
    assert (summary["violations"], summary["seed"]) == (0, 5)


def test_check_fails_when_a_law_is_broken(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def liar(world: World) -> OracleRunner:
        return OracleRunner(world.num_blocks, world.block_size, VOCAB_SIZE - 1)

    monkeypatch.setattr("quire.cli.check.numpy_oracle", liar)
    said = quire("check", "--steps", "300")
    assert said.status == 1
    assert json.loads(said.out.splitlines()[-1])["violations"] > 0
    assert "trial seed" in said.err


def test_models_lists_what_is_not_here_yet(quire: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("a folder whose name alone is far wider than any terminal " * 3).strip()
    monkeypatch.setenv("XDG_CACHE_HOME", str(deep))
    listed = quire("models")
    [row] = [line for line in listed.out.splitlines() if line.startswith("smollm2-135m-instruct (default)")]
    assert "absent" in row and str(deep) in row, "a row is one line where there is no terminal"
    assert "quire models --fetch NAME" in listed.out
    [entry] = map(json.loads, quire("models", "--json").out.splitlines())
    assert (entry["name"], entry["state"]) == ("smollm2-135m-instruct", "absent")
    assert quire("models", "--verify").status == 2


def test_models_fetch_and_verify_say_where_and_whether(quire: Shell, default_model_path: Path) -> None:
    assert quire("models", "--fetch").out == f"{default_model_path}\n"
    assert quire("models", "--verify").out == "smollm2-135m-instruct: the checksum is right.\n"


def test_doctor_advises_in_full(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec

    def without_numba(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name == "numba" else original(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without_numba)
    said = quire("doctor")
    assert said.status == 0
    [line] = [line for line in said.out.splitlines() if "numba " in line and "missing" in line]
    assert line.startswith("!") and 'pip install "quire[cpu]"' in line
    findings = json.loads(quire("doctor", "--json").out)
    assert findings["numba"]["advice"] == 'pip install "quire[cpu]"'
    assert {"torch", "device", "memory", "kernels", "default model"} <= findings.keys()


def test_doctor_says_who_attends_and_why(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = KernelChoice(ReferenceKernels(), "for a test", attention=("decodes by quire", "fa3 not: it needs a card"))
    asked: list[object] = []
    monkeypatch.setattr(doctor, "select_kernels", lambda *given: asked.append(given) or chosen)
    assert json.loads(quire("doctor", "--json").out)["attention"]["found"] == " · ".join(chosen.attention)
    assert asked[0][1:] == (USUAL_NEEDS,), "what is usual is what is tried"


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("32k", 32 * 1024), ("32K", 32 * 1024), ("1.5k", 1536), ("auto", None)],
)
def test_a_length_may_carry_a_unit(text: str, number: int | None) -> None:
    assert Size(binary_k=True, derived=True).convert(text, None, None) == number


@pytest.mark.parametrize(
    ("text", "number"),
    [("2GiB", 2 << 30), ("2gib", 2 << 30), ("500MB", 500_000_000), ("64MiB", 64 << 20), ("7", 7), ("0.5 GiB", 1 << 29)],
)
def test_a_memory_may_carry_a_unit(text: str, number: int) -> None:
    assert Size().convert(text, None, None) == number


def test_a_server_whose_model_has_a_broken_chat_template_says_so_when_it_is_ready() -> None:
    def speech(template: str | None) -> str:
        return speech_of(ServedModel("m", None, template, SamplingParams(), 1024, 100, 0))

    assert speech(None) == "no chat template: prompts only"
    assert speech("{{ messages }}\n{% if %}").startswith(
        "prompts only: the model's chat template cannot be used: line 2 is not valid: "
    )
    assert (
        speech("{{ messages }}") == ServedModel("m", None, "", SamplingParams(), 1024, 100, 0).model_format.description
    )
