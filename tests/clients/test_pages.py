"""The lines that docs/clients shows are run as they stand, but for the address, the model's name and the key."""

import re

import pytest

from tests import children
from tests.architecture.tree import ROOT
from tests.clients.client_world import KEY, MODEL
from tests.clients.environments import REQUIREMENTS, python

PAGES = ROOT / "docs" / "clients"

# page: the environment its Python runs in
SHOWN = {
    "openai": "openai-3",
    "anthropic": "anthropic",
    "langchain": "langchain",
    "litellm": "litellm",
    "instructor": "instructor",
    "pydantic-ai": "pydantic-ai",
    "openai-agents": "openai-agents",
    "ollama": "ollama",
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", SHOWN)
def test_the_lines_of_a_page_work(page: str, scripted_url: str) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
    for shown, real in (("http://127.0.0.1:8000", scripted_url), ("smollm2-135m-instruct", MODEL), ("sk-me", KEY)):
        assert shown in code
        code = code.replace(shown, real)
    done = children.run([python(SHOWN[page]), "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert page == "instructor" or done.stdout.startswith("Hello!"), done.stdout


def test_every_client_has_a_page() -> None:
    shown = (PAGES / "README.md").read_text()
    links = re.findall(r"\]\(([a-z-]+\.md)\)", shown)
    assert sorted(set(links)) == sorted(path.name for path in PAGES.glob("*.md") if path.name != "README.md")
    elsewhere = {"guidellm", "vllm-router", "sglang-router"}  # in benchmarks.md and docs/routers.md
    pages = {path.stem for path in PAGES.glob("*.md")} | elsewhere
    clients = {re.sub(r"-(2|3|npm)$", "", path.stem) for path in REQUIREMENTS.iterdir()}
    assert clients <= pages
