"""An error of the user ends in one sentence on stderr and an exit status, without a traceback."""

import errno
import os
import socket
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from quire.cli import bench_scheduler, models
from quire.cli.main import app
from quire.cli.serve import port_owner
from quire.config import _FOREIGN, EngineConfig, foreign_hint
from tests.cli.commands import Shell


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("run nosuchmodel hi", "There is no model 'nosuchmodel'"),
        ("run smollm3 hi", "Did you mean smollm2"),
        ("run ./nowhere.gguf hi", "There is no file or folder ./nowhere.gguf"),
        ("run hi --temperature -3", "temperature must be a number from 0 to 2, not -3.0."),
        ("run hi --max-tokens 0", "max_tokens must be a whole number"),
        ("run hi --top-p 0", "top_p must be a number above 0"),
        ("run hi --threads 0", "threads must be a whole number from 1"),
        ("run hi --dtype float16", "float16 is not for CPUs"),
        ("run hi --api-key k", "--api-key is the key of a server: give its address with --url."),
        ("run llama3.2:1b hi", "Names of Ollama's library are not known here; use a hub id"),
        ("pull llama3.2", "Names of Ollama's library are not known here; use a hub id"),
        ("run hi --device cpu --attention-backend fa3", "The attention backend fa3 needs a GPU"),
        ("run hi --load-format dummy", "Dummy weights need the name of a shape"),
        ("chat --presence-penalty 9", "presence_penalty must be a number from -2 to 2"),
        ("show --verify org/name", "org/name is not on this machine; quire pull org/name"),
        ("top http://[::1 --once", "http://[::1 is not a server address"),
        ("top http://:80 --once", "http://:80 is not a server address"),
        ("top 127.0.0.1:1 --once", "No server answers at http://127.0.0.1:1: Connection refused"),
        ("top http://127.0.0.1:99999 --once", "is not a server address"),
        ("serve --host 0.0.0.0", "--insecure-no-key"),
        ("serve --host 0.0.0.0 --admin-key k", "--insecure-no-key"),
        ("serve --host no.such.host.invalid --api-key k", "--host is an address of this machine"),
        ("serve --host 192.0.2.1 --api-key k", "--host is an address of this machine"),
        ("serve --served-model-name=", "--served-model-name is empty"),
        ("serve --api-key-file nowhere", "Cannot read the keys in nowhere: No such file"),
        ("serve --admin-key-file nowhere", "Cannot read the keys in nowhere: No such file"),
        ("serve --api-key é", "The key of key-1 must be 1 to 512 visible ASCII characters"),
        ("serve --allowed-origins a.example", "'a.example' is not an origin"),
        ("serve --ssl-keyfile k.pem", "--ssl-keyfile needs --ssl-certfile"),
        ("serve --ssl-certfile nowhere.pem", "Cannot use the certificate nowhere.pem: No such file"),
        ("serve --root-path api/", "--root-path 'api/' must be empty, or begin with a slash"),
        (
            "serve --otlp-endpoint collector:4318",
            "'collector:4318' is not a collector URL, such as http://127.0.0.1:4318",
        ),
        ("serve --otlp-endpoint http://", "'http://' is not a collector URL"),
        ("serve --otlp-endpoint http://[::1", "is not a collector URL"),
        ("serve --max-body 0", "--max-body must be at least 1 byte"),
        ("serve --host 192.0.2.1 --insecure-no-key", "Cannot listen on 192.0.2.1:8000"),
    ],
)
def test_a_mistake_is_one_sentence(quire: Shell, line: str, words: str) -> None:
    result = quire(*line.split())
    assert result.status == 2
    assert result.out == ""
    assert result.err.startswith("quire: ") and words in result.err
    assert result.err.count("\n") == 1, "one line, not wrapped"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("chatt", "Did you mean chat?"),
        ("help", "There is no command 'help': use quire --help"),
        ("ps", "quire top shows"),
        ("stop smollm2", "ends with Ctrl-C"),
        ("create x -f Modelfile", "quire serve takes a folder"),
        ("serve --enable-lora", "merge the adapter into the model"),
        ("serve -md x.gguf", "There is no -md here: use --speculative, with ngram, mtp, draft:MODEL or eagle:PATH."),
        ("serve a b", "Got unexpected extra argument (b). Several models are tables [models.NAME] of a file"),
        ("bench transformer", "Did you mean transformers?"),
        ("serve --model smollm2 --port 80", "quire serve smollm2\n"),
        ("serve --model-path=smollm2", "quire serve smollm2\n"),
        ("chat --model", "The model goes without --model: "),
        ("run -m smollm2 hi", 'quire run smollm2 "PROMPT"'),
        ("batch a.jsonl -o b.jsonl --model x", "quire batch INPUT.jsonl x\n"),
        ("doctor --model smollm2", "No such option"),
        ("serve --trust-remote-code", "code of a model's folder is never run"),
        ("serve --max-num-queued-reqs=9", "use --max-waiting."),
        ("run hi --swap-space 4", "use --host-kv-memory"),
        ("serve --ctx-size 4096", "There is no --ctx-size here: use --max-model-len."),
        ("serve --mem-fraction-static 0.8", "use --gpu-memory-utilization."),
        ("serve --disable-radix-cache", "switch --enable-prefix-caching off."),
        ("doctor --seed 1", "No such option"),
        ("frobnicate", "There are: batch, bench, chat, check"),
        ("run hi --temprature 0", "--temperature"),
        ("run one two three", "put the prompt in quotes"),
        ("run smollm2", "smollm2 is a model"),
        ("models --fetch", "quire pull fetches one"),
        ("run hi --max-model-len lots", "'lots' is not a size"),
        ("check --steps 0", "--steps"),
        ("serve --max-waiting-tokens auto", "'auto' is not a size"),  # it has no derived value
        ("serve --max-waiting-tokens 0", "it must be at least 1"),
        ("serve --shutdown-timeout nan", "'nan' is not a finite number"),
        ("bench regimes --rate nan", "'nan' is not a finite number"),
        ("bench scheduler --rows 99999999999", "is not a list of whole numbers from 1 to 100,000"),
        (f"bench scheduler --rows {'9' * 5000}", "is not a list of whole numbers from 1 to 100,000"),
        ("bench speculation --plot gain.svg", "--plot draws the gain of planted drafts: give --planted"),
        ("serve --port http", "'http' is not a whole number."),
        ("serve --unload-after never", "'never' is not a number."),
        ("serve --max_model_len 4096", "There is no --max_model_len here: use --max-model-len."),
        ("run hi --top_p 0.9", "There is no --top_p here: use --top-p."),
        ("serve --schedule-policy lpm", "by class, fair share, deadline and arrival"),
        ("serve tinyllama --workers 2", "--replicas adds engines"),
        ("run -p hi", "the prompt is the last word"),
        ("run -f prompt.txt", "quire run - < FILE reads the prompt"),
        ("run hi -no-cnv", "quire run continues the text"),
        ("run hi --json-schema {}", "SamplingParams takes json, regex, choice or grammar"),
        ("run hi --system x", "use quire chat --system."),
        ("chat -cnv", "There is no -cnv here: use quire chat."),
        ("top --url http://127.0.0.1:9", "quire top http://127.0.0.1:9\n"),
        ("plan", "quire bench capacity"),
        ("simulate", "quire bench serve --simulate"),
        ("bench race --rival 'x -- throughput", "no closing quotation"),
        ("bench race --rival= -- throughput", "it is empty; give the other engine's command in quotes"),
        ("bench race --rival nosuchprogram -- throughput", "there is no program 'nosuchprogram' on this machine"),
    ],
)
def test_a_wrong_command_line_gets_a_hint(quire: Shell, line: str, words: str) -> None:
    result = quire(*line.split())
    assert (result.status, result.out) == (2, "")
    assert words in result.err


def test_a_truncated_file_is_named(quire: Shell, default_model_path: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "half.gguf"
    with default_model_path.open("rb") as whole:
        damaged.write_bytes(whole.read(1_000_000))
    result = quire("run", str(damaged), "hi")
    assert result.status == 2
    assert str(damaged) in result.err and "damaged" in result.err


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_used_port_is_refused_before_a_model_is_loaded(quire: Shell) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        result = quire("serve", "org/nosuchmodel", "--port", str(port))
    assert result.status == 2
    assert f"Cannot listen on 127.0.0.1:{port}: Address already in use by pid {os.getpid()} (" in result.err
    assert "Use another --port, or --port 0 for any free one." in result.err
    assert port_owner(port) is None, "the socket is closed"


@pytest.mark.parametrize("command", ["serve", "batch in.jsonl -o -"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{{ messages }}\n{{ broken", "line 2 is not valid: unexpected end of template"),
        (b"{{ messages | no_such_filter }}", "line 1 is not valid: No filter named 'no_such_filter'."),
        (b"a\nb\n\xff\xfe{{ messages }}", "byte 4 (line 3) is not UTF-8 (invalid start byte). Save it as UTF-8."),
        (b" \n", "it is empty. Omit --chat-template to use the model's own."),
    ],
)
def test_an_invalid_chat_template_is_refused_before_a_model_is_located(
    quire: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, content: bytes, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    Path("chat.jinja").write_bytes(content)
    result = quire(*command.split(), "--chat-template", "chat.jinja", "--load-format", "dummy")
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("quire: --chat-template chat.jinja cannot be used: ") and words in result.err
    assert result.err.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "batch in.jsonl -o -"])
@pytest.mark.parametrize("option", ["--tool-call-parser", "--reasoning-parser"])
def test_an_unknown_parser_is_refused(
    quire: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in.jsonl").touch()
    result = quire(*command.split(), option, "gibberish")
    assert result.status == 2 and "gibberish" in result.err and result.err.count("\n") == 1


def test_hints_for_options_of_other_engines_name_options_that_exist() -> None:
    """An option that exists has no hint, and an option that a hint names exists. The same of keywords of `LLM`."""
    here = {name for each in app.commands["serve"].params for name in (*each.opts, *each.secondary_opts)}
    hints = [foreign_hint(name, as_flags=True) or "" for name in _FOREIGN]
    assert {word.rstrip(",;.") for hint in hints for word in hint.split() if word.startswith("--")} <= here
    assert not here & {"--" + name.replace("_", "-") for name in _FOREIGN}
    assert {field.name for field in fields(EngineConfig)} & set(_FOREIGN) == {"seed"}


def test_a_path_that_cannot_be_used_is_one_sentence(quire: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(as_json: bool) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/models/a.gguf")

    monkeypatch.setattr(models, "list_models", refused)
    result = quire("list")
    assert (result.status, result.out) == (2, "")
    assert result.err == "quire: Cannot use /models/a.gguf: Permission denied. Check the path and its permissions.\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("list", "\nInterrupted.\n"),
        ("bench scheduler --rows 1", "\nInterrupted.\n"),
        ("pull org/name", "Interrupted. The same command resumes it.\n"),
        ("pull smollm2", "Interrupted. Nothing was kept; the same command begins again.\n"),
    ],
)
def test_control_c_says_what_goes_on(quire: Shell, monkeypatch: pytest.MonkeyPatch, line: str, words: str) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "list_models", interrupted)
    monkeypatch.setattr(models, "locate", interrupted)
    monkeypatch.setattr(bench_scheduler, "scheduler", interrupted)
    result = quire(*line.split())
    assert (result.status, result.out, result.err) == (130, "", words)
