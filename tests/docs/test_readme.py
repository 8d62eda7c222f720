"""The README's first screen: what it shows is what happens, in the order a newcomer needs it."""

import ast
import re

import pytest
from click.testing import CliRunner

from quire.cli.main import app
from tests.docs.pages import DOCS, ROOT, blocks, table_rows
from tests.docs.running import output_of

README = ROOT / "README.md"
TEXT = README.read_text(encoding="utf-8")


def test_it_begins_with_one_sentence_then_a_command_then_python_then_figures_then_links() -> None:
    title, sentence, *_ = [part for part in TEXT.split("\n\n") if part]
    assert title == "# quire" and sentence.count(". ") == 0 and sentence.endswith(".")
    marks = [
        "```bash\npip install",
        "quire serve ",
        "curl http",
        "```python",
        "| One H200",
        "Models:",
        "**Documentation:**",
    ]
    places = [TEXT.index(mark) for mark in marks]
    assert places == sorted(places)


def test_its_first_screen_is_short() -> None:
    (code,) = blocks(README, "python")
    assert len(code.splitlines()) == 8
    assert len(table_rows(README)) == 1 + 6  # a head and six rows


@pytest.mark.usefixtures("default_model_path")
def test_the_python_runs() -> None:
    (code,) = blocks(README, "python")
    said = output_of(code)
    assert "Paris" in said and "length" in said


@pytest.mark.usefixtures("shallow_default")
def test_the_python_of_the_api_page_runs() -> None:
    said = output_of("\n".join(blocks(DOCS / "python-api.md", "python")))
    lines = said.splitlines()
    four, best, beam = [line for line in lines if line.startswith("[")]
    assert len(ast.literal_eval(four.rpartition("] ")[0] + "]")) == 4
    assert int(best.rpartition(" ")[2]) > 0, "the prompt was not found in the cache"
    assert beam.startswith("[")
    explained = lines[lines.index(beam) + 1 :]
    assert any("cache" in line or "cached" in line for line in explained), explained
    assert {"red", "green"} & set(lines), "a choice"
    assert any(line.startswith("get_weather {") for line in lines), "a tool is called"
    person = next(line for line in lines if line.startswith("{") and "age" in line)
    assert '"name"' in person
    assert "8" in lines, "eight tasks of AsyncLLM"
    assert lines[-1].startswith("invalid_parameter temperature")


COMMANDS = sorted(
    {
        command
        for page in ("README.md", "docs/getting-started.md", "docs/production.md", "docs/index.md")
        for block in blocks(ROOT / page, "bash")
        for command in re.findall(r"^quire (\w+)", block, re.MULTILINE)
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_exist(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0, result.output


def test_the_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    pages = [TEXT, (ROOT / "CONTRIBUTING.md").read_text()]
    targets = {target for text in pages for target in re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)}
    assert {"serve", "test", "docs", "lint"} <= targets
    assert {target for target in targets if not re.search(rf"^{target}:", makefile, re.MULTILINE)} == set()
