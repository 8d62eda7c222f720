"""Options from a file, the environment and flags: which one wins, what is refused, and the file that is printed."""

import tomllib
from pathlib import Path

import click
import pytest

from quire.cli.config_file import read_tables
from quire.cli.main import serve
from quire.cli.options import grouped_options
from tests.cli.commands import Shell

FILE = """
model = "smollm2"
port = 9001
max-model-len = "2k"
served_model_name = ["a", "b"]
allowed-origins = "http://one.test"
enable-prefix-caching = false
shutdown-timeout = 3
log-format = "json"
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "quire.toml"
    path.write_text(FILE)
    return path


def test_flags_override_the_environment_and_it_overrides_the_file(
    quire: Shell, monkeypatch: pytest.MonkeyPatch, config: Path, tmp_path: Path
) -> None:
    variables = {"QUIRE_PORT": "9002", "QUIRE_MAX_MODEL_LEN": "4k", "QUIRE_API_KEY": "sk-1 sk-2",
                 "QUIRE_INSECURE_NO_KEY": "true", "QUIRE_THREADS": "3"}  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    printed = quire("serve", "--config", str(config), "--max-model-len", "8k", "--print-config")
    values = tomllib.loads(printed.out)
    assert (values["model"], values["port"], values["max-model-len"], values["threads"]) == ("smollm2", 9002, 8192, 3)
    assert values["served-model-name"] == ["a", "b"] and values["allowed-origins"] == ["http://one.test"]
    assert values["enable-prefix-caching"] is False and values["insecure-no-key"] is True
    assert (values["shutdown-timeout"], values["log-format"], values["host"]) == (3.0, "json", "127.0.0.1")
    assert "sk-1" not in printed.out and "# api-key is set, and not shown" in printed.out
    assert "port = 9002  # environment" in printed.out and 'log-format = "json"  # config file' in printed.out
    again = tmp_path / "again.toml"
    again.write_text(printed.out)
    for name in variables:
        monkeypatch.delenv(name)
    assert tomllib.loads(quire("serve", "--config", str(again), "--print-config").out) == values


def test_the_port_of_a_kubernetes_service_is_no_option(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_PORT", "tcp://10.0.0.7:8000")
    assert tomllib.loads(quire("serve", "--print-config").out)["port"] == 8000


def test_a_mistyped_variable_is_told_and_one_of_kubernetes_is_not(
    quire: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("QUIRE_MAX_MODEL_LENGTH", "QUIRE_PORT_8000_TCP", "QUIRE_SERVICE_HOST", "QUIRE_SERVICE_PORT", "QUIRE_HOME")
    for name in names:
        monkeypatch.setenv(name, "1")
    result = quire("serve", "nosuchmodel")
    first, second = result.err.splitlines()
    assert (
        first == "quire: QUIRE_MAX_MODEL_LENGTH in the environment is not an option; did you mean QUIRE_MAX_MODEL_LEN?"
    )
    assert "There is no model 'nosuchmodel'" in second


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("prot = 1", "has 'prot', which is not an option of quire serve. Did you mean port?"),
        ("zzzzzz = 1", "quire serve --print-config lists all of them"),
        (
            "[engine]\nport = 1",
            "has the table [engine], which quire serve does not read. Its only tables are [models.NAME]",
        ),
        (
            "[modls.a]\nmodel = 'x'",
            "has the table [modls.a], which quire serve does not read. Did you mean [models.a]?",
        ),
        ("[Model.a]\nmodel = 'x'", "Did you mean [models.a]?"),
        ("[model]\nname = 'x'", "Did you mean [models.NAME]?"),
        ("[port]\nnumber = 1", "Write port = … on a line of its own, above all tables."),
        ("[models.a.b]\nmodel = 'x'", "[models.a], has 'b', which is not an option of one model"),
        ("[[models]]\nmodel = 'x'", "has models that are not tables; write [models.NAME]"),
        ("models = 1", "has models that are not tables; write [models.NAME]"),
        ("[models.a]\nport = 1", "[models.a], has 'port', which is not an option of one model"),
        ("[models.a]\nmax-model-len = 'long'", "[models.a], has max-model-len: 'long'"),
        ("[models.a]\npinned = 1", "has 1 for pinned, which is true or false"),
        ("[models.' ']\npinned = true", "a name has 1 to 200 printable characters"),
        ("model = 'x'\n[models.a]", "'x' is given beside the tables [models.NAME]"),
        ("served-model-name = 'x'\n[models.a]", "--served-model-name is for one model"),
        ("models-max = 2", "--models-max is for several models"),
        ("unload-after = 2", "--unload-after is for several models"),
        ("port = [1]", "has a list for port, which takes one value"),
        ("port = 1979-05-27", "a value is a text, a number, true or false"),
        ("port = 'many'", "from --config"),
        ("port = 1.5", "'1.5' is not a whole number, from --config"),
        ("port", "is not TOML"),
        (None, "cannot be read: No such file"),
    ],
)
def test_a_wrong_file_is_refused(quire: Shell, tmp_path: Path, text: str | None, words: str) -> None:
    path = tmp_path / "quire.toml"
    if text is not None:
        path.write_text(text)
    result = quire("serve", "--config", str(path))
    assert result.status == 2 and words in result.err, result.err


TABLES = """
max-model-len = "1k"
[models.small]
model = "smollm2"
pinned = true
kv-cache-memory = "256MiB"
[models."other:8b"]
served-model-name = ["other"]
unload-after = 60
"""


def test_several_models_have_options_of_their_own(quire: Shell, tmp_path: Path) -> None:
    path = tmp_path / "quire.toml"
    path.write_text(TABLES)
    values = tomllib.loads(quire("serve", "--config", str(path), "--print-config").out)
    assert values["models"] == tomllib.loads(TABLES)["models"] and values["max-model-len"] == 1024
    with serve.make_context("serve", ["--config", str(path)]) as context:
        small, other = read_tables(context)
    assert (small.name, small.pinned, small.given["model"], small.given["kv_cache_memory"]) == (
        "small",
        True,
        "smollm2",
        256 << 20,
    )
    assert small.given["max_model_len"] == other.given["max_model_len"] == 1024
    assert (other.name, other.given["aliases"], other.given["unload_after_s"]) == ("other:8b", ("other",), 60.0)


@pytest.mark.usefixtures("default_model_path")
@pytest.mark.parametrize(
    ("tables", "options", "words"),
    [
        ("[models.a]\npinned=true\n[models.b]", ("--models-max", "1"), "1 models are pinned: 2 is the least"),
        ("[models.a]\n[models.b]", ("--models-memory", "1GiB"), "the largest other one take about"),
        ("[models.a]\n[models.b]\nserved-model-name='a'", (), "Two models have the name 'a'"),
        ("[models.a]\nmodel='/nowhere'", (), "quire: [models.a]: There is no file or folder /nowhere"),
    ],
)
def test_models_that_can_never_be_loaded_are_refused(
    quire: Shell, tmp_path: Path, tables: str, options: tuple[str, ...], words: str
) -> None:
    path = tmp_path / "quire.toml"
    path.write_text(tables)
    result = quire("serve", "--port", "0", "--config", str(path), *options)
    assert result.status == 2 and words in result.err, result.err


def test_a_wrong_variable_is_named(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_TEMPERATURE", "hot")
    result = quire("run", "hi")
    assert result.status == 2 and "from QUIRE_TEMPERATURE in the environment" in result.err


def test_every_option_of_serve_has_a_variable_and_almost_all_a_group(quire: Shell) -> None:
    options = [param for param in serve.params if isinstance(param, click.Option)]
    variables = [option.envvar for option in options]
    assert len(set(variables)) == len(variables) and all(str(name).startswith("QUIRE_") for name in variables)
    others = {param.name for param in grouped_options(serve)["Other options"]}
    assert others == {"config", "print_config", "kv_events", "record", "otlp_endpoint", "log_format"}
    shown = quire("serve", "--help").out
    for heading in ("Model:", "Address:", "Keys and limits:", "Device and memory:", "Scheduling:", "Other options:"):
        assert f"\n{heading}\n" in shown
    assert all(next(name for name in option.opts if name.startswith("--")) in shown for option in options)
