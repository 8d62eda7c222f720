"""Ctrl-C while a command is imported ends it without a traceback. What shells complete."""

import json
import os
import re
import signal
import sys
import tomllib
from pathlib import Path

import pexpect
import pytest

import quire
from quire.cli.entry import main
from tests import children
from tests.cli.commands import QUIRE

# Ctrl-C while the module of that name is imported by `quire` with these arguments. The module hides the exception, as
# torch does one of numpy.
INTERRUPTED = """
import importlib, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == WHERE:
            try:
                signal.raise_signal(signal.SIGNAL)
            except KeyboardInterrupt:
                if HIDDEN:
                    raise ImportError("hidden") from None
                raise

sys.meta_path.insert(0, Interrupt())
sys.argv = ["quire", *ARGUMENTS]
"""
# Of the first module that `main` imports, of its last one, and of one that an option's callback imports.
WHERES = ["quire.core.process", "click", "quire.cli.usage_errors", "quire.cli.build_info"]


def interrupted(where: str, *arguments: str, entry: str, signal: str = "SIGINT", hidden: bool = False) -> str:
    program = INTERRUPTED.replace("WHERE", repr(where)).replace("ARGUMENTS", repr(arguments))
    program = program.replace("SIGNAL", signal).replace("HIDDEN", repr(hidden)) + entry
    ended = children.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.stdout == ""
    return f"{ended.returncode} {ended.stderr.strip()}".strip()


def console_script() -> str:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, function = project["scripts"]["quire"].partition(":")
    return f"importlib.import_module({module!r}).{function}()"


@pytest.mark.parametrize("entry", ["import runpy; runpy.run_module('quire', run_name='__main__')", console_script()])
@pytest.mark.parametrize("where", WHERES)
def test_control_c_during_the_imports_ends_it_quietly(entry: str, where: str) -> None:
    assert interrupted(where, "--version", entry=entry) in ("130", "130 Interrupted.")


@pytest.mark.parametrize("where", WHERES[:-1])
def test_no_module_hides_control_c(where: str) -> None:
    assert interrupted(where, "--version", entry=console_script(), hidden=True) == "130"


@pytest.mark.parametrize(
    ("command", "signal", "ended"),
    [
        ("doctor", "SIGINT", "130 Interrupted."),
        ("serve", "SIGINT", "0 Stopped."),
        ("serve", "SIGTERM", "0 Stopped."),
        ("doctor", "SIGTERM", "-15"),
    ],
)
def test_no_library_hides_an_interrupt(command: str, signal: str, ended: str, default_model_path: Path) -> None:
    """As numpy and torch do: what they cannot import, they do without."""
    where = "numpy" if command == "doctor" else "quire.engine.startup"
    assert interrupted(where, command, entry=console_script(), signal=signal, hidden=True) == ended


def test_control_c_that_is_ignored_stays_so() -> None:
    """A script starts what it runs in the background so."""
    entry = "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + console_script()
    program = INTERRUPTED.replace("WHERE", "'click'").replace("ARGUMENTS", "['--version']").replace("SIGNAL", "SIGINT")
    program = program.replace("HIDDEN", "False") + entry
    ended = children.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.startswith("quire ")


def test_little_is_imported_before_control_c_is_handled() -> None:
    """An interrupt in the meantime shows a traceback. `typing` takes as long as all the rest of a Python start."""
    program = (
        f"import os, sys; sys.path.insert(0, {str(Path(quire.__file__).parents[1])!r}); before = {{*sys.modules}}; "
    )
    program += "import quire.cli.entry; print(*sorted({*sys.modules} - before))"
    ended = children.run([sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, check=True)
    ours = {"quire", "quire.cli", "quire.cli.entry", "quire.version"}
    assert {*ended.stdout.split()} <= {
        *ours,
        "importlib",
        "importlib._bootstrap",
        "importlib._bootstrap_external",
        "warnings",
        "_signal",
    }


def test_windows_is_refused_in_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(SystemExit) as end:
        main()
    said = capsys.readouterr().err
    assert (end.value.code, said.count("\n")) == (2, 1) and "WSL 2" in said
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(ImportError, match="WSL 2"):
        getattr(quire, "LLM")  # noqa: B009  # as `from quire import LLM` does


def asked_by_bash(line: str) -> dict[str, str]:
    """What bash asks for at the end of a line, which it cuts at spaces, colons and equals signs."""
    words = re.findall(r"[:=]|[^\s:=]+", line) + [""] * line.endswith(" ")
    return {"_QUIRE_COMPLETE": "bash_complete", "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}


def completed(line: str) -> list[str]:
    """What a shell is offered, by a process as it starts one."""
    ended = children.run([QUIRE], env={**os.environ, **asked_by_bash(line)}, capture_output=True, text=True, check=True)
    assert ended.stderr == ""
    return ended.stdout.split()


def test_shells_complete_commands_and_options() -> None:
    assert completed("quire chat --ur") == ["plain,--url"]
    assert completed("quire models x") == [] == completed("quire run smollm2 ")
    assert completed("quire batch ") == ["file,"] == completed("quire batch -o ")


# Of each environment what `quire` prints, in a child of one process that has imported it.
COMPLETING = """
import json, os, sys
from quire.cli.main import main
sys.argv = ["quire"]
for asked in json.load(sys.stdin):
    if (child := os.fork()) == 0:
        os.environ.update(asked)
        main()
    os.waitpid(child, 0)
    print("end", flush=True)
"""
MODELS = {
    "quire serve ": "smollm2-135m-instruct smollm2 mine theirs org/gguf:x-Q4_K_M.gguf org/whole models/",
    "quire show smo": "smollm2-135m-instruct smollm2",
    "quire run th": "theirs",
    "quire chat org/g": "org/gguf:x-Q4_K_M.gguf",
    "quire chat org/gguf:x": "x-Q4_K_M.gguf",
    "quire serve mod": "models/a.gguf models/b.gguf models/folder",
    "quire serve models/a": "models/a.gguf",
    "quire rm ": "mine theirs org/gguf:x-Q4_K_M.gguf org/whole",
    "quire bench throughput --model mi": "mine",
    "quire serve --speculative ngr": "ngram ngram+tree",
    "quire serve --speculative ngram+draft:": "smollm2-135m-instruct smollm2 mine theirs org/gguf:x-Q4_K_M.gguf "
    "org/whole models/",
    "quire serve --speculative draft:mi": "mine",
    "quire serve --speculative=draft:models/b": "models/b.gguf",
    "quire serve --speculative dra": "draft:smollm2-135m-instruct draft:smollm2 draft:mine draft:theirs "
    "draft:org/gguf:x-Q4_K_M.gguf draft:org/whole draft:models/",
    "quire serve nothing": "",
}


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with models, and a cache of quire and one of the hub beside it."""
    files = ["models/a.gguf", "models/b.gguf", "models/folder/config.json", "models/two words.gguf", "models/note.txt"]
    files += ["cache/quire/models/mine.gguf", "cache/quire/models/theirs/config.json"]
    files += ["hub/models--org--whole/snapshots/1/config.json", "hub/models--org--gguf/snapshots/1/x-Q4_K_M.gguf"]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    return tmp_path


def test_shells_complete_models(models: Path) -> None:
    (models / "hub").rename(models.parent / f"{models.name}-hub")
    (models / "cache").rename(models.parent / f"{models.name}-cache")
    beside = f"{models.parent}/{models.name}"
    places = {"XDG_CACHE_HOME": f"{beside}-cache", "HF_HUB_CACHE": f"{beside}-hub"}
    ended = children.run(
        [sys.executable, "-c", COMPLETING],
        input=json.dumps([asked_by_bash(line) for line in MODELS]),
        env={**os.environ, **places}, cwd=models, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ended.stderr == ""
    found = dict(zip(MODELS, ended.stdout.split("end\n"), strict=False))
    assert {line: printed.split() for line, printed in found.items()} == {
        line: [f"plain,{word}" for word in offered.split()] for line, offered in MODELS.items()
    }


def test_completion_of_models_reads_no_large_library() -> None:
    program = "import sys; sys.argv = ['quire']\ntry:\n    from quire.cli.entry import main; main()\nfinally:\n    "
    program += "print(*{'torch', 'numpy', 'huggingface_hub', 'rich.table'} & {*sys.modules})"
    asked = {"_QUIRE_COMPLETE": "bash_complete", "COMP_WORDS": "quire serve ", "COMP_CWORD": "2"}
    ended = children.run([sys.executable, "-c", program], env={**os.environ, **asked}, capture_output=True, text=True)
    assert ended.stdout.splitlines()[0] == "plain,smollm2-135m-instruct" and ended.stdout.splitlines()[-1] == ""


def test_bash_completes_models(models: Path) -> None:
    """A real one, with its own ends of words."""
    path = f"{Path(QUIRE).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "XDG_CACHE_HOME": str(models / "cache"), "HF_HUB_CACHE": "/nowhere"}
    bash = pexpect.spawn(
        "bash", ["--norc", "--noprofile", "-i"], env=environment, cwd=models, encoding="utf8", timeout=60
    )
    try:
        bash.sendline("bind 'set enable-bracketed-paste off'; PS1='> '; eval \"$(_QUIRE_COMPLETE=bash_source quire)\"")
        bash.sendline("echo rea''dy")
        bash.expect("ready\r\n> ")
        for typed, whole in (("show mi", "show mine "), ("serve --speculative draft:mi", "draft:mine ")):
            bash.send(f"quire {typed}\t")
            bash.expect_exact(whole)
            bash.send("\x15")  # Ctrl-U
    finally:
        bash.close(force=True)
