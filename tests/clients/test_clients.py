"""The clients that people bring, each in its own environment, against the real server over HTTP."""

import shutil

import pytest

from tests.clients.client_world import MODEL
from tests.clients.environments import SCRIPTS, environment, errors, outcomes, python

SCRIPT_OF = {
    "openai-3": "use_openai.py",
    "openai-2": "use_openai.py",
    "anthropic": "use_anthropic.py",
    "langchain": "use_langchain.py",
    "litellm": "use_litellm.py",
    "instructor": "use_instructor.py",
    "pydantic-ai": "use_pydantic_ai.py",
    "openai-agents": "use_openai_agents.py",
    "llm": "use_llm.py",
    "ollama": "use_ollama.py",
}


@pytest.mark.timeout(900)  # the first run makes the environment
@pytest.mark.parametrize("client", SCRIPT_OF)
def test_a_python_client(client: str, scripted_url: str) -> None:
    went = outcomes(python(client), str(SCRIPTS / SCRIPT_OF[client]), scripted_url, MODEL)
    assert errors(went) == {}


@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here")
def test_the_npm_client(scripted_url: str) -> None:
    home = environment("openai-npm")
    went = outcomes("node", str(SCRIPTS / "use_openai.mjs"), scripted_url, MODEL, str(home))
    assert errors(went) == {}
