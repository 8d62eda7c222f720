"""Every class of published advisories against serving engines (S1 to S26), as requests and as checks of the program.

A refusal has the API's shape, without an address, a path or a stack in its text, and the next request of another client
is answered correctly. At the end nothing was executed or fetched, and memory, metrics and engine are as before.
"""

import ast
import asyncio
import json
import re
import socket
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from quire.core.errors import ChatTemplateError, QuireError
from quire.formats.gguf_file import read_gguf
from quire.formats.hf_folder import read_safetensors
from quire.formats.open_checkpoint import open_checkpoint
from quire.output_parsing.tool_formats import FORMATS
from quire.text.chat_template import render
from tests import children
from tests.architecture.test_dependencies import requirements
from tests.architecture.test_trust import offenders
from tests.architecture.tree import ROOT, dotted, imported_names
from tests.attack.advisories import USER, Case, completion, corpus, http
from tests.attack.conftest import INNOCENT
from tests.attack.more_requests import more_requests
from tests.chaos.conftest import Report
from tests.output_parsing.parsing import parse
from tests.server.many_clients import RawResponse, fetch, fetch_all
from tests.server.scripted_servers import check_control, scripted
from tests.server.server_process import Running, wait_until_at_rest

PROMPT = "a prompt that no log may hold"
LEAKS = re.compile(rb"0x[0-9a-f]{6}| object at |Traceback|File \"|/usr/|/tmp/|/home/|/root|site-packages|\.py\b|/proc/")


class Listener:
    """A port that nothing may connect to."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])

    @property
    def was_asked(self) -> bool:
        try:
            self._socket.accept()
        except BlockingIOError:
            return False
        return True


@pytest.fixture(scope="module")
def logged(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Path]]:
    """A server of its own, and its log."""
    folder = tmp_path_factory.mktemp("advisories")
    keys, log = folder / "keys", folder / "log"
    keys.write_text("sk-hostile name=hostile\nsk-innocent name=innocent\n")
    options = ("--api-key-file", str(keys), "--log-format", "json", "--files-dir", str(folder / "files"))
    with log.open("w") as out, scripted(folder, *options, stdout=out) as it:
        yield it, log


def is_error(response: RawResponse) -> bool:
    """Whether a body has the shape of an error of its API: OpenAI's, Anthropic's, TGI's or Ollama's."""
    try:
        body = json.loads(response.body)
    except ValueError:
        return False
    error = body.get("error")
    if isinstance(error, str):
        return isinstance(body.get("error_type"), str) or body.keys() == {"error"}
    if body.get("type") == "error":
        return {"type", "message"} <= error.keys()
    return isinstance(error, dict) and {"message", "type", "param", "code"} == error.keys()


def faults(case: Case, response: RawResponse) -> list[str]:
    found = [] if response.status in case.statuses else [f"status {response.status}, not {sorted(case.statuses)}"]
    if response.status >= 400 and not is_error(response):
        found.append("not the shape of an error")
    if response.status >= 400 and len(response.body) > 4096:
        found.append(f"an error of {len(response.body)} bytes")
    if LEAKS.search(response.body):
        found.append("a leak")
    return [f"{case.advisory} {case.what}: {each}: {response.body[:200]!r}" for each in found]


def series(server: Running) -> int:
    with server.client(headers=INNOCENT) as client:
        client.get("/metrics")  # counts itself in the next page
        lines = client.get("/metrics").text.splitlines()
    return len([line for line in lines if not line.startswith("#")])


def random_names(numbers: Iterable[int]) -> list[bytes]:
    """Methods, paths, models and ids that were not seen before."""
    return [
        sent
        for number in numbers
        for sent in (
            http("/v1/models", method=f"METHOD{number}"),
            http(f"/v1/unknown/{number}", method="GET"),
            http(f"/v1/models/unknown-{number}", method="GET"),
            completion(model=f"unknown-{number}", user=f"user-{number}", cache_salt=f"salt-{number}"),
            http("/v1/completions", {"prompt": "hi"}, headers={"X-Request-Id": f"id-{number}"}),
            http("/v1/models", method="GET", key=f"sk-unknown-{number}"),
        )
    ]


@pytest.mark.timeout(600)
def test_requests_of_the_corpus(logged: tuple[Running, Path], tmp_path: Path, report: Report) -> None:
    server, log = logged
    canary, listener = tmp_path / "canary", Listener()
    cases = [*corpus(str(canary), listener.port), *more_requests()]
    engine = server.engine_pid

    async def attack(client: object) -> list[str]:
        found: list[str] = []
        for case in cases:
            found += faults(case, await fetch(server.port, case.sent))
            await asyncio.to_thread(check_control, client)
        return found

    with server.client(headers=INNOCENT) as client:
        check_control(client)
        before_bytes = server.resident_bytes
        found = asyncio.run(attack(client))
        asyncio.run(fetch_all(server.port, [*random_names(range(2)), completion(prompt=PROMPT)], at_once=4))
        wait_until_at_rest(client)
        num_series = series(server)
        asyncio.run(fetch_all(server.port, random_names(range(2, 50)), at_once=4))
        wait_until_at_rest(client)
        check_control(client)
    grown_bytes = server.resident_bytes - before_bytes
    counts = Counter(case.advisory for case in cases)
    report(f"advisory corpus: {len(cases)} requests of {len(counts)} classes, failures", len(found))
    report(
        "  memory of the front process, MiB more; series of metrics more",
        (grown_bytes >> 20, series(server) - num_series),
    )
    assert not found, "\n".join(found)
    assert not canary.exists() and not listener.was_asked
    assert server.engine_pid == engine and series(server) == num_series
    assert grown_bytes < 128 << 20, "bodies of up to 16 MiB, and texts of a million characters"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    written = log.read_text()
    assert all(set(line) >= {"time", "level"} for line in lines) and not [
        1 for line in lines if line["level"] == "fatal"
    ]
    assert PROMPT not in written and "sk-" not in written and "Traceback" not in written


def test_one_port_and_no_socket_of_the_file_system(logged: tuple[Running, Path], report: Report) -> None:
    """S2: of all processes of the server. The engine's socket is a pair that has no name."""
    server, _ = logged
    pids = tree(server.process.pid)
    held = {target for pid in pids for target in sockets(pid)}
    tcp = [row for name in ("tcp", "tcp6") for row in rows(f"/proc/net/{name}") if row[3] == "0A" and row[9] in held]
    udp = [row for name in ("udp", "udp6") for row in rows(f"/proc/net/{name}") if row[9] in held]
    unix = [row for row in rows("/proc/net/unix") if row[6] in held and len(row) > 7]
    ports = [int(row[1].rpartition(":")[2], 16) for row in tcp]
    report(f"listening TCP ports of {len(pids)} processes", len(ports))
    assert ports == [server.port] and not udp and not unix
    assert len(pids) > 1


def tree(pid: int) -> list[int]:
    children_of = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(below for child in children_of for below in tree(child))]


def sockets(pid: int) -> list[str]:
    links = [str(fd.readlink()) for fd in Path(f"/proc/{pid}/fd").iterdir() if fd.is_symlink()]
    return [link[len("socket:[") : -1] for link in links if link.startswith("socket:[")]


def rows(table: str) -> list[list[str]]:
    return [line.split() for line in Path(table).read_text().splitlines()[1:]]


# Files of a model

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 8,
    "max_position_embeddings": 8, "rms_norm_eps": 1e-6,
}  # fmt: skip


def safetensors(header: object, data: bytes = bytes(64)) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tensor(shape: object = (4,), offsets: object = (0, 16), dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS = {
    "a negative offset": safetensors({"a": tensor(offsets=(-16, 0))}),
    "an end before its start": safetensors({"a": tensor(offsets=(16, 0))}),
    "an end beyond the file": safetensors({"a": tensor((2**20,), (0, 2**22))}),
    "offsets that are no numbers": safetensors({"a": tensor(offsets=("0", None))}),
    "a size of 2^63": safetensors({"a": tensor((2**63, 2**63))}),
    "a negative size": safetensors({"a": tensor((-4,))}),
    "a size that does not fit": safetensors({"a": tensor((5,))}),
    "a boolean size": safetensors({"a": tensor((True, 4))}),
    "a type that is a list": safetensors({"a": tensor(dtype=["F32"])}),
    "a header of 2^63 bytes": struct.pack("<Q", 2**63) + b"{}",
    "a header longer than the file": struct.pack("<Q", 10**6) + b"{}",
    "a header that is no object": safetensors([]),
    "a deep header": safetensors(b"[" * 100_000 + b"]" * 100_000),
    "a pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94.",
    "a zip, as torch writes it": b"PK\x03\x04" + bytes(200),
    "nothing": b"",
}
MAGIC = b"GGUF" + struct.pack("<I", 3)


def key_value(name: bytes, kind: int, value: bytes) -> bytes:
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


def described(num_dims: int, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    sizes = b"".join(struct.pack("<Q", each) for each in dims)
    return MAGIC + struct.pack("<QQ", 1, 0) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", num_dims) + sizes + (
        struct.pack("<IQ", kind, offset) + bytes(64)
    )  # fmt: skip


GGUF = {
    "2^64 tensors": MAGIC + struct.pack("<QQ", 2**64 - 1, 0),
    "2^60 entries": MAGIC + struct.pack("<QQ", 0, 2**60),
    "a key of 2^60 bytes": MAGIC + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**60) + bytes(64),
    "a text of 2^63 bytes": MAGIC + struct.pack("<QQ", 0, 1) + key_value(b"a", 8, struct.pack("<Q", 2**63)),
    "an array of 2^61": MAGIC + struct.pack("<QQ", 0, 1) + key_value(b"a", 9, struct.pack("<IQ", 6, 2**61)),
    "an unknown type of value": MAGIC + struct.pack("<QQ", 0, 1) + key_value(b"a", 99, bytes(64)),
    "arrays in arrays": MAGIC + struct.pack("<QQ", 0, 1) + key_value(b"a", 9, struct.pack("<IQ", 9, 1) * 50_000),
    "no UTF-8": MAGIC + struct.pack("<QQ", 0, 1) + key_value(b"\xff\xfe", 4, bytes(4)),
    "2^32 dimensions": described(2**32 - 1, ()),
    "five dimensions": described(5, (1, 1, 1, 1, 1)),
    "2^63 elements": described(2, (2**32, 2**31)),
    "an overflow to 4": described(4, (2**32, 2**32, 2**32, 4)),
    "an offset beyond the file": described(1, (4,), offset=2**62),
    "an unknown quantization": described(1, (32,), kind=99),
    "version 0": b"GGUF" + struct.pack("<I", 0) + bytes(64),
    "half a header": MAGIC + b"\x01",
}


def refusal(read: Callable[[Path], object], path: Path, content: bytes) -> str | None:
    path.write_bytes(content)
    try:
        read(path)
    except QuireError as error:
        return error.message
    return None


def test_hostile_weight_files(tmp_path: Path, report: Report) -> None:
    """S3, S8: a file that describes more than it has is refused by name; nothing is allocated for it."""
    passed = [
        *(what for what, content in SAFETENSORS.items()
          if "m.safetensors" not in (refusal(read_safetensors, tmp_path / "m.safetensors", content) or "")),
        *(what for what, content in GGUF.items()
          if "m.gguf" not in (refusal(read_gguf, tmp_path / "m.gguf", content) or "")),
    ]  # fmt: skip
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.ckpt", "model.pkl"):
        folder = tmp_path / name.replace(".", "-")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / name).write_bytes(SAFETENSORS["a pickle"])
        try:
            open_checkpoint(folder)
            passed.append(name)
        except QuireError:
            continue
    report(f"hostile weight files: {len(SAFETENSORS) + len(GGUF) + 5} kinds, accepted", len(passed))
    assert not passed


@pytest.mark.parametrize("options", [(), ("-O",)])
def test_no_code_of_a_model_folder_is_run(tmp_path: Path, options: tuple[str, ...]) -> None:
    """S4: every name in the configuration that makes others import; also where assertions are compiled away."""
    canary = tmp_path / "canary"
    module = "modeling_evil.EvilForCausalLM"
    names = dict.fromkeys(("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor"), module)
    evil = {**CONFIG, "auto_map": names, "trust_remote_code": True, "_attn_implementation_internal": module,
            "attn_implementation": module, "custom_generate": ".", "tokenizer_class": module}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(evil))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": names, "tokenizer_class": module}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"custom_generate": module}))
    for name in ("modeling_evil.py", "generate.py", "__init__.py", "conftest.py", "sitecustomize.py"):
        (tmp_path / name).write_text(f"open({str(canary)!r}, 'w')\n")
    program = (
        "import sys\nfrom quire.config import EngineConfig\nfrom quire.core.errors import QuireError\n"
        "from quire.engine.open_model import open_model\n"
        f"try:\n    open_model(EngineConfig(model={str(tmp_path)!r}))\nexcept QuireError as e:\n    print(e.message)\n"
        "assert 'modeling_evil' not in sys.modules\nif 'modeling_evil' in sys.modules: sys.exit(3)\n"
    )
    done = children.run([sys.executable, *options, "-c", program], stdout=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout and not canary.exists()


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ cycler.__init__.__globals__.os.popen('%s') }}",
    "{{ lipsum.__globals__['os'].system('%s') }}", "{{ joiner.__init__.__globals__ }}", "{{ namespace.__init__ }}",
    "{{ self.__init__.__globals__.__builtins__ }}", "{{ self._TemplateReference__context }}",
    "{{ range.__init__.__self__ }}", "{{ messages|attr('__class__') }}", "{{ ''|attr('__cl'~'ass__') }}",
    "{{ ''|attr('format')('{0.__class__}')|attr('mro') }}", "{{ '{0.__class__.__base__}'.format(messages) }}",
    "{{ ['%s']|map('system')|list }}", "{{ messages|map(attribute='__class__')|list }}",
    "{{ [''.format]|map('attr', '__self__')|list|first|attr('__class__') }}", "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__['sys'] }}", "{{ tojson.__globals__ }}", "{% import 'os' as os %}{{ os.system('%s') }}",
    "{% include '/etc/passwd' %}", "{% extends '/etc/passwd' %}", "{% from 'os' import system %}",
    "{% macro f() %}{% endmacro %}{{ f.__init__.__globals__ }}", "{{ loop.__class__ }}", "{{ g.pop.__globals__ }}",
    "{{ config.items() }}", "{{ url_for.__globals__ }}", "{{ get_flashed_messages.__globals__ }}",
    "{{ (messages|groupby('role'))|first|attr('__class__') }}", "{{ (1).__class__ }}", "{{ none.__class__.mro() }}",
    "{{ ''.join.__self__.__class__ }}", "{% set x = messages.append(1) %}{{ x.__class__ }}",
    "{{ ().__class__.__bases__[0] }}", "{{ {}['__class__'] }}", "{{ messages.__getitem__.__self__ }}",
    "{{ dict.__base__.__subclasses__() }}", "{{ (messages|first).__setitem__('a', 1) }}",
    "{{ \"%%c\"|format(95)|attr('x') }}{{ ''|attr(\"%%c%%cclass%%c%%c\"|format(95,95,95,95)) }}",
]  # fmt: skip
SHOWN = re.compile(r"<class|<module|<function|<built-in|root:x:|uid=\d")


def test_escapes_from_the_template_sandbox(tmp_path: Path, report: Report) -> None:
    """S5: in the template of a model itself."""
    canary = tmp_path / "canary"
    escaped = []
    for template in ESCAPES:
        try:
            rendered = render(template.replace("%s", f"touch {canary}"), USER)
        except ChatTemplateError:
            continue
        if SHOWN.search(rendered):
            escaped.append((template, rendered[:200]))
    report(f"{len(ESCAPES)} template escapes: successes", len(escaped))
    assert not escaped and not canary.exists()


def test_hostile_text_of_a_model_is_parsed_and_not_run(tmp_path: Path, report: Report) -> None:
    """S6: every tool format."""
    canary = tmp_path / "canary"
    code = f"__import__('os').system('touch {canary}')"
    texts = [
        code, f"[{code}]", f"[f(a={code})]", f'{{"name": "f", "arguments": {code}}}', f"f(**{{'a': {code}}})",
        f"<tool_call>\n{code}\n</tool_call>", f"<function=f><parameter=a>{code}</parameter></function>",
        f"[lambda: {code}]()", f"[f(a=({code}))]", f"<|python_tag|>{code}", f"[TOOL_CALLS]f[ARGS]{code}",
        "[f(a=" + "(" * 10_000, "[f(a=" + "[" * 10_000, "<tool_call>" + '{"a":' * 10_000, "{" * 10_000, "f(" * 10_000,
    ]  # fmt: skip
    for tool_format in FORMATS.values():
        for text in texts:
            parse(tool_format, [text])
            parse(tool_format, list(text[:2000]))
    report(
        "hostile output of a model, texts × tool formats, executed", (len(texts) * len(FORMATS), int(canary.exists()))
    )
    assert not canary.exists()


FORBIDDEN_CALLS = {"os.system", "os.popen", "subprocess.getoutput", "request.url", "request.base_url"}
FORBIDDEN_MODULES = {"multiprocessing", "requests", "aiohttp", "httpx", "zmq", "diskcache"}  # they unpickle, or fetch


def forbidden(tree: ast.AST) -> list[str]:
    """Shells, URLs that are rebuilt from the Host header, queues that unpickle, and clients that fetch."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node) in FORBIDDEN_CALLS:
            found.append(dotted(node))
        elif isinstance(node, ast.keyword) and node.arg == "shell":
            found.append("shell")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += [name for name in imported_names(node) if name.split(".")[0] in FORBIDDEN_MODULES]
    return found


def test_the_source_has_none_of_it() -> None:
    """S1, S21, S22, S26: what the advisories name. What unpickles, evaluates or makes an open template is in
    `tests/architecture/test_trust.py`."""
    urls_of_lines = {"server/batch/lines.py", "server/batch/runner.py"}  # a line of a batch has one
    publisher = "engine/kv_event_publisher.py"  # of an extra, off by default: it reads 8-byte numbers alone
    assert not offenders(forbidden, spared={*urls_of_lines, publisher, "catalog", "bench"})  # no part of a server
    published = ast.parse((ROOT / "src" / "quire" / publisher).read_text())
    assert forbidden(published) == ["zmq"]
    reads = {node.attr for node in ast.walk(published) if isinstance(node, ast.Attribute) and "recv" in node.attr}
    assert reads == {"recv_multipart"}, "others unpickle"
    assert forbidden(ast.parse("import zmq\nrun(x, shell=True)\nos.system(x)")) == ["zmq", "shell", "os.system"]
    wanted = requirements(without=("ray",))  # that extra unpickles what a cluster's own machines send, see docs/ray.md
    asked = {each.name: tuple(map(int, each.lower_bound.split("."))) for each in wanted if each.lower_bound}
    assert not {"diskcache", "dill", "cloudpickle", "joblib", "ray"} & set(asked)
    on_ray = offenders(lambda tree: {name for name in imported_names(tree) if name.split(".")[0] == "ray"})
    assert set(on_ray) == {"engine/ray_engine.py", "ray.py"}, "loaded with --ray alone"
    assert asked["python-multipart"] >= (0, 0, 31), "CVE-2026-42561, and limits on the names of headers"
    assert asked["starlette"] >= (1, 3) and asked["jinja2"] >= (3, 1, 6), "CVE-2026-48710, CVE-2025-27516"
