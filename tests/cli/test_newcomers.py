"""What a first user meets: missing extras, interrupted batches, a question to a model of chats, the version."""

import json
import re
import sys
from pathlib import Path

import pytest

from quire.cli import chat, options
from quire.cli.bench import COMMANDS
from quire.cli.console import StartupProgress
from quire.cli.printed_reply import PrintedReply, ReplyEnd
from quire.cli.usage_errors import OTHER_BENCH_OPTIONS
from quire.server.batch import runner
from quire.version import __version__
from tests.cli.commands import SMALL, Shell
from tests.server.server_process import wait_until


@pytest.mark.parametrize("name, extra", [("kernels", "gpu"), ("transformers", "bench")])
def test_a_benchmark_names_the_extra_that_it_needs(
    quire: Shell, monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setattr(options, "_is_installed", lambda package: False)
    result = quire("bench", name)
    assert result.status == 2 and f'pip install "quire[{extra}]"' in result.err
    assert result.err.count("\n") == 1


def test_an_interrupted_batch_says_how_it_goes_on(
    quire: Shell, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, default_model_path: Path
) -> None:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")

    def interrupted(server: object, settings: runner.BatchSettings) -> None:
        settings.write(b"{}\n")
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_batch", interrupted)
    result = quire("batch", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl"))
    assert result.status == 130
    assert "Interrupted after 1 lines of this run. The same command continues" in result.err
    assert (tmp_path / "out.jsonl").read_bytes() == b"{}\n"
    result = quire("batch", str(tmp_path / "in.jsonl"), "-o", "-")
    assert result.status == 130 and "With -o FILE" in result.err


@pytest.mark.usefixtures("shallow_default")
@pytest.mark.parametrize("given, hinted", [((), True), (("--chat",), False)])
def test_a_question_that_gets_no_text_gets_a_hint(
    quire: Shell, monkeypatch: pytest.MonkeyPatch, given: tuple[str, ...], hinted: bool
) -> None:
    monkeypatch.setattr(chat, "print_reply", lambda *_, **__: PrintedReply("", ReplyEnd("stop", 1), 0.1, None))
    result = quire("run", "What is the capital of France?", *given, *SMALL)
    assert (result.status, result.out) == (0, "\n")
    assert ("use quire run --chat" in result.err) == hinted


@pytest.mark.usefixtures("shallow_default")
def test_a_question_that_is_continued_gets_a_hint(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text begins where the question ends: often with an empty line, which is printed as it is."""
    text = PrintedReply("\n\nThe", ReplyEnd("length", 5), 0.1, None)
    monkeypatch.setattr(chat, "print_reply", lambda *_, **__: text)
    assert "use quire run --chat" in quire("run", "What is the capital of France?", *SMALL).err
    assert "--chat" not in quire("run", "The capital of France is", *SMALL).err


def test_a_start_that_takes_long_says_so_until_it_ends() -> None:
    said: list[str] = []
    progress = StartupProgress(said.append, every_s=0.01)
    progress.say("weights")
    with progress:
        wait_until(lambda: sum(line.startswith("  starting ") for line in said) >= 2)
        progress.end()
        progress.say("ready")
    assert said[0] == "weights" and "ready" in said[-2:], "at most one more, that was on its way"


def test_the_version_has_what_a_report_needs(quire: Shell) -> None:
    result = quire("--version")
    assert result.status == 0 and result.out.splitlines()[0] == f"quire {__version__}"
    assert "torch 2" in result.out and "CPU kernels" in result.out and sys.version.split()[0] in result.out


@pytest.mark.parametrize("option", OTHER_BENCH_OPTIONS)
def test_options_of_other_benchmarks_are_explained(quire: Shell, option: str) -> None:
    """By what exists: every option that a hint names is one of a benchmark."""
    result = quire("bench", "overhead" if option in ("-p", "-n", "-r") else "serve", option, "1")
    assert result.status == 2 and f"There is no {option} here: {OTHER_BENCH_OPTIONS[option]}." in result.err
    known = {name for command in COMMANDS for param in command.params for name in param.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", OTHER_BENCH_OPTIONS[option])) <= known


def test_benchmarks_of_other_engines_are_explained(quire: Shell) -> None:
    result = quire("bench", "one_batch")
    assert result.status == 2 and "There is no command 'one_batch': use quire bench latency." in result.err
    assert "'serving': use quire bench serve." in quire("bench", "serving").err
    assert "There is no command 'generate': use quire run" in quire("generate").err
