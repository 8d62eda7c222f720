"""`quire bench speculation`: prompts that repeat where they should, and figures of pairs with the same outputs."""

import json
from pathlib import Path

import pytest

from quire import LLM
from quire.bench.speculation import (
    PlantedFigure,
    SpeculationFigure,
    measure_planted,
    measure_speculation,
    planted_plot,
    prompts_of,
)
from quire.config import EngineConfig
from quire.core.step import Runner
from quire.engine import build_runner
from quire.engine.build import build
from quire.kernels.cpu.torch_kernels import TorchCpuKernels
from quire.kernels.draft_interface import REFERENCE_DRAFT_KERNELS
from quire.kernels.select import KernelChoice
from quire.runner.model_runner import ModelRunner
from tests.cli.commands import Shell
from tests.llm.tiny import tiny_llama, write_model
from tests.runner.reference_row_kernels import REFERENCE_ROW_KERNELS

PERFORMANCE = Path(__file__).parents[2] / "docs" / "performance"


def test_the_plot_in_the_docs_has_the_raw_figures() -> None:
    """Made by this; and a curve for each acceptance, with the governor and without, over the numbers of requests."""
    raw = (PERFORMANCE / "raw" / "h200-nineteenth-verify.txt").read_text().partition("--drafts 7")[0]
    found = [json.loads(line) for line in raw.splitlines() if line.startswith('{"chance"')]
    figures = [PlantedFigure(**{name: each[name] for name in PlantedFigure._fields}) for each in found]
    picture = planted_plot("Llama-3.1-8B on an H200", figures)
    assert picture == (PERFORMANCE / "speculation.svg").read_text()
    assert picture.count("<polyline") == 4 and all(name in picture for name in ("80%, governor", "0%, always"))
    assert planted_plot("one", figures[-1:]).count("<polyline") == 2


@pytest.mark.parametrize("task", ["quote", "chat", "json"])
def test_every_request_and_every_repeat_has_a_prompt_of_its_own(task: str) -> None:
    prompts = [prompt for repeat in range(4) for prompt in prompts_of(task, 8, repeat)]
    assert len(set(prompts)) == 32


def test_a_repeat_asks_the_same_and_a_quotation_has_its_text_twice() -> None:
    assert prompts_of("repeat", 3, 1) == prompts_of("repeat", 3, 2)
    assert set(prompts_of("repeat", 3, 1)).isdisjoint(prompts_of("chat", 3, 0))
    (prompt,) = prompts_of("quote", 1, 0)
    passage, begun = prompt.split("\n\nThe same text again:\n\n")
    assert passage.startswith(begun) and len(begun) < len(passage) / 4


def test_a_figure_is_the_median_of_its_pairs() -> None:
    figure = SpeculationFigure("chat", 1, 10, (2.0, 3.0, 8.0), (1.0, 1.0, 1.0), 5, 4)
    assert figure.ratios == [2.0, 3.0, 8.0] and figure.ratio == 3.0


def test_both_engines_answer_every_prompt(tmp_path: Path) -> None:
    folder = write_model(tmp_path, tiny_llama())
    plain, drafting = (LLM(str(folder), dtype="float32", speculative=drafts) for drafts in ("off", "auto"))
    said: list[str] = []
    figures = list(
        measure_speculation(
            plain, drafting, tasks=("repeat", "chat", "json"), sizes=(1, 3), repeats=2, num_output=20, say=said.append
        )
    )
    assert [(each.task, each.num_requests, each.num_tokens) for each in figures] == [
        ("repeat", 1, 20), ("repeat", 3, 60), ("chat", 1, 20), ("chat", 3, 60), ("json", 1, 20), ("json", 3, 60),
    ]  # fmt: skip
    assert all(len(each.ratios) == 2 and each.ratio > 0 for each in figures)
    assert all(0 < each.accepted <= each.drafted for each in (figures[0], figures[-1]))
    assert said == ["repeat, 1", "repeat, 3", "chat, 1", "chat, 3", "json, 1", "json, 3"]


@pytest.fixture
def steps_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU they are called again instead of replayed."""
    choice = KernelChoice(TorchCpuKernels(), "planted", REFERENCE_ROW_KERNELS, REFERENCE_DRAFT_KERNELS)
    monkeypatch.setattr(build_runner, "select_kernels", lambda *args, **options: choice)


def test_the_command_plots_planted_drafts(quire: Shell, steps_of_a_gpu: None, tmp_path: Path) -> None:
    file = tmp_path / "gain.svg"
    line = "bench speculation --model tiny --load-format dummy --planted 1,0 --device cpu --requests 1,2"
    result = quire(*line.split(), "--tokens", "8", "--input", "120", "--repeats", "1", "--plot", str(file))
    assert result.status == 0 and "always 4 drafts" in result.out, result.err
    assert file.read_text().count("<polyline") == 4 and "100%, governor" in file.read_text()


def test_a_draft_model_takes_its_time_beside_planted_drafts(quire: Shell, steps_of_a_gpu: None) -> None:
    line = "bench speculation --model tiny --load-format dummy --speculative draft:tiny --planted 1 --device cpu --json"
    result = quire(*line.split(), "--requests", "2", "--tokens", "8", "--input", "40", "--repeats", "1")
    assert result.status == 0, result.err
    figure = json.loads(result.out)
    assert figure["chance"] == 1.0 and figure["settings"]["drafters"] == ["draft"]


@pytest.mark.parametrize("sampling", ["penalties", "logprobs"])
def test_planted_drafts_of_requests_that_ask_for_more(quire: Shell, steps_of_a_gpu: None, sampling: str) -> None:
    line = f"bench speculation --model tiny --load-format dummy --planted 1 --sampling {sampling} --device cpu --json"
    result = quire(*line.split(), "--requests", "2", "--tokens", "8", "--input", "40", "--repeats", "1")
    assert result.status == 0, result.err
    figure = json.loads(result.out)
    assert figure["sampling"] == sampling and figure["chance"] == 1.0 and len(figure["governed_s"]) == 1


def test_sampling_is_for_planted_drafts(quire: Shell) -> None:
    result = quire("bench", "speculation", "--sampling", "logprobs")
    assert result.status == 2 and "--sampling logprobs is for planted drafts: give --planted" in result.err


@pytest.mark.usefixtures("steps_of_a_gpu")
def test_planted_drafts_are_accepted_as_often_as_was_said(tmp_path: Path) -> None:
    folder, runners = write_model(tmp_path, tiny_llama()), list[Runner]()

    def observe(runner: Runner) -> Runner:
        runners.append(runner)
        return runner

    config = EngineConfig(model=str(folder), dtype="float32", speculative="ngram", max_num_seqs=2, device="cpu")
    built = build(config, observe=observe, planted_drafts=True)
    (runner,) = runners
    assert isinstance(runner, ModelRunner)
    while not runner.prepared:
        runner.prepare()
    said: list[str] = []
    figures = []
    counts = []
    for figure in measure_planted(
        LLM.over(built), runner, chances=(1.0, 0.0), sizes=(1, 2), repeats=1, num_input=9, num_output=26, num_drafts=4,
        say=said.append,
    ):  # fmt: skip
        figures.append(figure)
        counters = built.engine.scheduler.counters
        counts.append((counters.drafted_tokens, counters.accepted_tokens))
    assert [(each.chance, each.num_requests, len(each.plain_s)) for each in figures] == [
        (1.0, 1, 1), (1.0, 2, 1), (0.0, 1, 1), (0.0, 2, 1),
    ]  # fmt: skip
    assert counts[0][1] >= 20 and counts[1] > counts[0], "25 tokens after the first, in steps of up to 5"
    assert counts[1][1] == counts[3][1] and counts[3][0] > counts[1][0], "then none is accepted"
    assert said == ["100% accepted, 1", "100% accepted, 2", "0% accepted, 1", "0% accepted, 2"]


def test_a_planted_figure_compares_the_governor_and_a_fixed_number_with_none() -> None:
    figure = PlantedFigure(0.8, 16, 96, (6.0, 8.0, 9.0), (3.0, 2.0, 3.0), (6.0, 4.0, 9.0))
    assert (figure.governed, figure.fixed) == (3.0, 1.0)
