"""`quire bench speculation`: prompts that repeat where they should, and figures of pairs with the same outputs."""

from pathlib import Path

import pytest

from quire import LLM
from quire.bench.speculation import SpeculationFigure, measure_speculation, prompts_of
from tests.llm.tiny import tiny_llama, write_model


@pytest.mark.parametrize("task", ["quote", "chat"])
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
            plain, drafting, tasks=("repeat", "chat"), sizes=(1, 3), repeats=2, num_output=20, say=said.append
        )
    )
    assert [(each.task, each.num_requests, each.num_tokens) for each in figures] == [
        ("repeat", 1, 20), ("repeat", 3, 60), ("chat", 1, 20), ("chat", 3, 60),
    ]  # fmt: skip
    assert all(len(each.ratios) == 2 and each.ratio > 0 for each in figures)
    assert 0 < figures[0].accepted <= figures[0].drafted
    assert said == ["repeat, 1", "repeat, 3", "chat, 1", "chat, 3"]
