"""Agents of the command line, each with one tool call and one answer from the script, in an empty home of their own."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import children
from tests.clients.client_server import scripted
from tests.clients.client_world import FOLDER
from tests.clients.environments import environment

# What the agents call their shells: codex 0.166, Claude Code 2.1.
LINES: tuple[dict[str, object], ...] = (
    {"when": "<tool_response>", "say": "It is done."},
    {
        "when": "with exec_command",
        "say": '<tool_call>\n{"name": "exec_command", "arguments": {"cmd": "echo word > seen.txt"}}\n</tool_call>',
    },
    {
        "when": "with Bash",
        "say": '<tool_call>\n{"name": "Bash", "arguments": {"command": "echo word > seen.txt", "description": "Say"}}'
        "\n</tool_call>",
    },
    {"say": "Hello from the script."},
)
CODEX_CONFIG = """\
model = "scripted"
model_provider = "quire"

[model_providers.quire]
name = "quire"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "QUIRE_API_KEY"
"""

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm here"),
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[str]:
    flags = ("--max-model-len", "64k", "--kv-cache-memory", "4GiB", "--served-model-name", "scripted")
    with scripted(
        tmp_path_factory.mktemp("agents"), LINES, *flags, "--chat-template", str(FOLDER / "tools.jinja")
    ) as url:
        yield url


def ask(command: list[str], home: Path, settings: dict[str, str]) -> str:
    """What an agent says last, started in its home with these variables and no others of ours."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **settings}
    done = children.run(
        command,
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


def test_codex_answers_and_uses_its_shell(url: str, tmp_path: Path) -> None:
    binary = str(environment("codex") / "node_modules" / ".bin" / "codex")
    (tmp_path / "config.toml").write_text(CODEX_CONFIG.format(url=url))
    settings = {"CODEX_HOME": str(tmp_path), "QUIRE_API_KEY": "none"}
    flags = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
    assert ask([binary, *flags, "Say hello."], tmp_path, settings) == "Hello from the script."
    assert ask([binary, *flags, "Use it, with exec_command."], tmp_path, settings) == "It is done."
    assert (tmp_path / "seen.txt").read_text() == "word\n"


def test_claude_code_answers_and_uses_its_shell(url: str, tmp_path: Path) -> None:
    binary = str(environment("claude-code") / "node_modules" / ".bin" / "claude")
    settings = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "scripted",
        "ANTHROPIC_SMALL_FAST_MODEL": "scripted",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    assert ask([binary, "-p", "Say hello."], tmp_path, settings) == "Hello from the script."
    told = ask([binary, "-p", "Use it, with Bash.", "--allowedTools", "Bash"], tmp_path, settings)
    assert told == "It is done."
    assert (tmp_path / "seen.txt").read_text() == "word\n"
