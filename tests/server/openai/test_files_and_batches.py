"""OpenAI's files and batches over HTTP: what they return, whose they are, their limits, and what a restart leaves."""

import io
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from quire.core.errors import ConfigError
from quire.server import file_store
from quire.server.batch_store import BatchStore, StoredBatch
from quire.server.file_store import FileStore
from tests.server.local_server import LocalServer, local_server
from tests.server.server_process import wait_until
from tests.server.several_models import several_here

LINES = (
    {"step_ms": 1},
    {"say": "Bang", "break": True, "when": "boom"},
    {"say": "on and on ", "end": False, "when": "endless"},
    {"say": "Hello."},
)
URL = "/v1/chat/completions"


def request(custom_id: str, text: str = "hi", url: str = URL, **body: object) -> dict[str, object]:
    message = {"role": "user", "content": text}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {"messages": [message], **body}}


def jsonl(*lines: object) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[LocalServer]:
    folder = tmp_path_factory.mktemp("files")
    (folder / "keys").write_text("sk-one name=one\nsk-two name=two\n")
    options = ("--files-dir", str(folder / "kept"), "--files-limit", "1MiB", "--api-key-file", str(folder / "keys"))
    with local_server(folder, LINES, "--max-model-len", "1k", "--max-body", "32k", *options) as running:
        yield running


def client_of(server: LocalServer, key: str = "sk-one") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=60)


def upload(client: openai.OpenAI, content: bytes, name: str = "in.jsonl") -> str:
    return client.files.create(file=(name, io.BytesIO(content)), purpose="batch").id


def run_batch(client: openai.OpenAI, *lines: object, **fields: Any) -> Batch:
    """A batch, when it has ended."""
    batch = client.batches.create(
        input_file_id=upload(client, jsonl(*lines)), endpoint=URL, completion_window="24h", **fields
    )
    assert batch.status == "validating"
    wait_until(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "expired", "cancelled"))
    return client.batches.retrieve(batch.id)


def results(client: openai.OpenAI, file_id: str | None) -> dict[str, dict[str, Any]]:
    """The lines of an output file, by custom_id."""
    assert file_id is not None
    lines = [json.loads(line) for line in client.files.content(file_id).text.splitlines()]
    return {line["custom_id"]: line for line in lines}


def test_a_file_is_uploaded_listed_read_and_deleted(server: LocalServer) -> None:
    content = bytes(range(256)) * 1000  # more than one read of the socket, with every byte
    with client_of(server) as client:
        made = client.files.create(file=("../../a b.jsonl", io.BytesIO(content)), purpose="batch")
        assert made.id.startswith("file-") and (made.filename, made.purpose) == ("a b.jsonl", "batch")
        assert made.bytes == len(content) and made.status == "processed"
        assert client.files.content(made.id).read() == content
        other = client.files.create(
            file=("b", io.BytesIO(b"")),
            purpose="user_data",
            expires_after={"anchor": "created_at", "seconds": 3600},
        )
        assert other.expires_at == other.created_at + 3600
        assert {each.id for each in client.files.list()} >= {made.id, other.id}
        assert [each.id for each in client.files.list(purpose="user_data")] == [other.id]
        assert client.files.retrieve(made.id) == made
        assert client.files.delete(made.id).deleted and client.files.delete(other.id).deleted
        with pytest.raises(openai.NotFoundError):
            client.files.retrieve(made.id)


def test_the_file_of_another_key_does_not_exist(server: LocalServer) -> None:
    with client_of(server) as one, client_of(server, "sk-two") as two, client_of(server, "sk-none") as stranger:
        file_id = upload(one, jsonl(request("a")))
        batch = one.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h")
        assert list(two.files.list()) == [] and list(two.batches.list()) == []
        for call in (two.files.retrieve, two.files.content, two.files.delete):
            with pytest.raises(openai.NotFoundError):
                call(file_id)
        with pytest.raises(openai.NotFoundError):
            two.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h")
        for call in (two.batches.retrieve, two.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                call(batch.id)
        with pytest.raises(openai.AuthenticationError):
            stranger.files.list()
        wait_until(lambda: one.batches.retrieve(batch.id).status == "completed")
        one.files.delete(file_id)


@pytest.mark.parametrize("file_id", ["..", "../lock", "%2e%2e%2flock", "file-" + "0" * 32, "file-x/../../lock"])
def test_an_id_is_never_a_path(server: LocalServer, file_id: str) -> None:
    with httpx.Client(base_url=server.url, headers={"authorization": "Bearer sk-one"}) as client:
        for path in (f"/v1/files/{file_id}", f"/v1/files/{file_id}/content", f"/v1/batches/{file_id}"):
            assert client.get(path).status_code == 404


def test_uploads_are_bounded(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with client_of(server, "sk-two") as client:
        monkeypatch.setattr(file_store, "MAX_FILE_BYTES", 100_000)
        with pytest.raises(openai.APIStatusError) as large:
            upload(client, b"x" * 200_000)
        assert large.value.status_code == 413 and large.value.code == "file_too_large"
        monkeypatch.undo()
        with pytest.raises(openai.RateLimitError) as full:
            upload(client, b"x" * (1 << 20) + b"y")
        assert full.value.code == "files_full" and "--files-limit" in full.value.message
        monkeypatch.setattr(file_store, "MAX_FILES", 0)
        with pytest.raises(openai.RateLimitError, match="delete some"):
            upload(client, b"x")
        assert list(client.files.list()) == []
    assert not list(kept(server).glob("files/*.part"))


def kept(server: LocalServer) -> Path:
    folder = server._access._files_dir
    assert folder is not None
    return folder


FORM = "multipart/form-data; boundary=x"


def form(name: str, content: bytes) -> bytes:
    """A form with one part."""
    return b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n--x--' % (name.encode(), content)


@pytest.mark.parametrize(
    ("kind", "body", "words"),
    [
        ("application/json", b"{}", "An upload is multipart/form-data"),
        ("multipart/form-data", b"", "An upload is multipart/form-data"),
        (FORM, b"no form", "is not multipart/form-data"),
        (FORM, b"--x\r\n", "has no end"),
        (FORM, form("purpose", b"batch"), "no file"),
        (FORM, form("file", b"1"), "purpose is None"),
        (FORM, form("a", b"a" * 5000), "more than 4096"),
        (FORM + "x" * 300, form("a", b"a"), "Boundary length 301 exceeds"),
        (FORM, b"".join(form(f"f{place}", b"")[:-5] for place in range(99)), "more than 4096"),
    ],
)
def test_a_wrong_form_is_refused_and_leaves_nothing(server: LocalServer, kind: str, body: bytes, words: str) -> None:
    headers = {"authorization": "Bearer sk-two", "content-type": kind}
    response = httpx.post(f"{server.url}/v1/files", content=body, headers=headers)
    assert response.status_code == 400 and words in response.json()["error"]["message"], response.text
    assert not list(kept(server).glob("files/*.part"))


def test_without_keys_the_uploads_of_one_address_leave_the_places_of_another(
    tmp_path: Path, default_model_path: Path
) -> None:
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\nContent-Type: %b\r\n\r\n--x\r\n" % FORM.encode()
    )
    folder = tmp_path / "kept"
    purpose = form("purpose", b"batch")[:-5]
    whole = purpose + b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nall\r\n--x--'
    with (
        local_server(tmp_path, LINES, "--max-model-len", "1k", "--files-dir", str(folder)) as server,
        ExitStack() as open_,
    ):
        for _ in range(file_store.MAX_UPLOADS):
            open_.enter_context(socket.create_connection(("127.0.0.1", server.port))).sendall(head)
        wait_until(lambda: len(list(folder.glob("files/*.part"))) == file_store.MAX_UPLOADS)
        answers = []
        for address in ("127.0.0.1", "127.0.0.2"):
            with httpx.Client(transport=httpx.HTTPTransport(local_address=address), timeout=60) as client:
                answers.append(client.post(f"{server.url}/v1/files", content=whole, headers={"content-type": FORM}))
    assert [each.status_code for each in answers] == [429, 200], [each.text for each in answers]
    assert answers[0].json()["error"]["code"] == "files_full"


def test_an_upload_that_is_cut_off_leaves_nothing(server: LocalServer) -> None:
    head = (
        b"POST /v1/files HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-two\r\nContent-Length: 9000\r\n"
        b"Content-Type: multipart/form-data; boundary=x\r\n\r\n"
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\nthe beginning'
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head)
        wait_until(lambda: list(kept(server).glob("files/*.part")))  # while the body arrives
    wait_until(lambda: not list(kept(server).glob("files/*.part")))


def test_a_batch_has_answers_and_errors_in_files(server: LocalServer) -> None:
    with client_of(server) as client:
        lines = [request("a"), request("b", "boom"), request("c", temperature=9)]
        batch = run_batch(client, *lines, metadata={"for": "test"})
        assert batch.status == "completed" and batch.errors is None and batch.metadata == {"for": "test"}
        assert batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
        assert batch.in_progress_at and batch.finalizing_at and batch.completed_at and batch.expires_at
        answers, errors = results(client, batch.output_file_id), results(client, batch.error_file_id)
        assert answers.keys() == {"a"} and errors.keys() == {"b", "c"}
        body = answers["a"]["response"]["body"]
        assert answers["a"]["error"] is None and body["choices"][0]["message"]["content"] == "Hello."
        assert errors["c"]["response"]["status_code"] == 400
        assert errors["c"]["response"]["body"]["error"]["param"] == "temperature"
        assert errors["b"]["response"]["status_code"] == 500
        file = client.files.retrieve(str(batch.output_file_id))
        assert file.purpose == "batch_output" and file.filename == f"{batch.id}_output.jsonl"
        assert client.batches.list().data[0].id == batch.id


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"", "empty_file", "no requests"),
        (b"{}\n", "invalid_line", "Line 1 is not a request: custom_id is missing; it must be text."),
        (jsonl(request("a"), request("a")), "duplicate_custom_id", "Line 2 has the custom_id"),
        (jsonl(request("a", url="/v1/completions")), "invalid_line", "a batch may POST to /v1/chat/completions"),
        (jsonl(request("a", stream=True)), "invalid_line", "a batch has no streams"),
        (jsonl(request("a", "x" * 40_000)) + jsonl(request("b")), "line_too_long", "Line 1 has more than 32000 bytes"),
        (b" " * 40_000 + b"\n" + jsonl(request("b")), "line_too_long", "Line 1 has more than 32000 bytes"),
        (jsonl(request("a" * 513)), "custom_id_too_long", "a custom_id of 513 characters; the limit is 512"),
        (b"\n" * 100_000 + jsonl(request("a")), "too_many_lines", "more than 100000 lines"),
        (b"{}\n" * 50_001, "too_many_requests", "more than 50000 requests"),
    ],
)
def test_an_invalid_file_fails_its_batch(server: LocalServer, content: bytes, code: str, words: str) -> None:
    with client_of(server) as client:
        made = client.batches.create(input_file_id=upload(client, content), endpoint=URL, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(made.id).status == "failed")
        batch = client.batches.retrieve(made.id)
        assert batch.errors is not None and batch.errors.data is not None
        problem = batch.errors.data[-1]
        assert problem.code == code and words in str(problem.message)
        assert len(batch.errors.data) == 1 or code == "too_many_requests"
        assert batch.output_file_id is None and batch.error_file_id is None


def test_a_file_at_its_limits_is_valid(server: LocalServer) -> None:
    with client_of(server) as client:
        content = b"\n" * 99_998 + jsonl(request("a" * 512)) + b" " * 1000 + b"\n"
        made = client.batches.create(input_file_id=upload(client, content), endpoint=URL, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(made.id).status == "completed")
        assert results(client, client.batches.retrieve(made.id).output_file_id).keys() == {"a" * 512}


def test_wrong_bodies_are_refused(server: LocalServer) -> None:
    with client_of(server) as client:
        file_id = upload(client, jsonl(request("a")))
        data = client.files.create(file=("x", io.BytesIO(b"x")), purpose="user_data").id
        wrong: tuple[tuple[dict[str, Any], str], ...] = (
            ({"endpoint": "/v1/images"}, "endpoint"),
            ({"completion_window": "soon"}, "completion_window"),
            ({"input_file_id": data}, "input_file_id"),
            ({"metadata": {"x": "y" * 600}}, "metadata"),
        )
        for fields, param in wrong:
            body = {"input_file_id": file_id, "endpoint": URL, "completion_window": "24h", **fields}
            with pytest.raises(openai.BadRequestError) as refused:
                client.batches.create(**body)
            assert refused.value.param == param
        assert client.files.delete(file_id).deleted and client.files.delete(data).deleted


def test_the_results_of_a_batch_are_bounded_as_files_are(server: LocalServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that would exceed the limit of its key ends with what there is room for; then no other begins."""
    with client_of(server, "sk-two") as client:
        source = upload(client, jsonl(*(request(f"r{place}") for place in range(9))))
        upload(client, b"x" * ((1 << 20) - 2_000 - sum(each.bytes for each in client.files.list())))
        made = client.batches.create(input_file_id=source, endpoint=URL, completion_window="24h")
        wait_until(lambda: client.batches.retrieve(made.id).status == "failed")
        batch = client.batches.retrieve(made.id)
        assert batch.errors is not None and batch.errors.data is not None
        assert batch.errors.data[0].code == "files_full" and "--files-limit" in str(batch.errors.data[0].message)
        assert 0 < len(results(client, batch.output_file_id)) < 9
        assert sum(each.bytes for each in client.files.list()) <= 1 << 20
        monkeypatch.setattr(file_store, "MAX_FILES", 1)
        with pytest.raises(openai.RateLimitError, match="delete some"):
            client.batches.create(input_file_id=source, endpoint=URL, completion_window="24h")
        monkeypatch.undo()
        for each in list(client.files.list()):
            client.files.delete(each.id)


def test_a_batch_is_cancelled_with_what_it_has(server: LocalServer) -> None:
    with client_of(server) as client:
        endless = [request(f"e{place}", "endless", max_tokens=900) for place in range(40)]
        file_id = upload(client, jsonl(request("a"), *endless))
        batch = client.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h")

        def counts() -> Any:
            return client.batches.retrieve(batch.id).request_counts

        wait_until(lambda: counts().completed >= 1)
        with pytest.raises(openai.BadRequestError, match="cancel it first"):
            client.files.delete(file_id)
        assert client.batches.cancel(batch.id).status == "cancelling"
        wait_until(lambda: client.batches.retrieve(batch.id).status == "cancelled")
        ended = client.batches.retrieve(batch.id)
        assert ended.cancelled_at and "a" in results(client, ended.output_file_id)
        assert client.batches.cancel(batch.id).status == "cancelled"


def test_a_restarted_server_goes_on_with_its_batches(tmp_path: Path, default_model_path: Path) -> None:
    options = ("--files-dir", str(tmp_path / "kept"), "--max-model-len", "1k")
    with local_server(tmp_path, LINES, *options) as server, client_of(server) as client:
        with pytest.raises(ConfigError, match="in use by another server"):
            FileStore(tmp_path / "kept", 1, lambda: 0.0)
        slow = [request(f"e{place}", "endless", max_tokens=900) for place in range(40)]
        lines = [request("a"), *slow]
        file_id = upload(client, jsonl(*lines))
        batch = client.batches.create(input_file_id=file_id, endpoint=URL, completion_window="24h")
        wait_until(lambda: "Hello." in (tmp_path / "kept" / "batches" / f"{batch.id}.output").read_text())
    output = tmp_path / "kept" / "batches" / f"{batch.id}.output"
    whole = output.read_bytes()
    output.write_bytes(whole + b'{"id":"batch_req_cut')  # the end of a server in the middle of a line
    first = next(line for line in whole.splitlines() if b'"custom_id":"a"' in line)
    with local_server(tmp_path, ({"say": "Again."},), *options) as server, client_of(server) as client:
        wait_until(lambda: client.batches.retrieve(batch.id).status == "completed")
        ended = client.batches.retrieve(batch.id)
        answers = results(client, ended.output_file_id)
        assert ended.request_counts is not None and ended.request_counts.completed == 41
        assert answers["a"] == json.loads(first) and len(answers) == 41
        assert {each["response"]["body"]["choices"][0]["message"]["content"] for each in answers.values()} >= {"Again."}
        assert not list((tmp_path / "kept" / "batches").glob("*.output"))


def test_what_is_not_done_in_time_expires(tmp_path: Path, default_model_path: Path) -> None:
    files = FileStore(tmp_path / "kept", 1 << 20, lambda: 1000.0)
    source = tmp_path / "in"
    source.write_bytes(jsonl(request("a"), request("b")))
    stored = files.add(source, "", "in", "batch")
    store = BatchStore(files, lambda: 1000.0)
    batch: StoredBatch = store.create("", stored, URL, "1h", None)  # an hour after 1970
    files.close()
    with (
        local_server(tmp_path, LINES, "--files-dir", str(tmp_path / "kept")) as server,
        client_of(server) as client,
    ):
        wait_until(lambda: client.batches.retrieve(batch.id).status == "expired")
        ended = client.batches.retrieve(batch.id)
        errors = results(client, ended.error_file_id)
        assert ended.expired_at and {each["error"]["code"] for each in errors.values()} == {"batch_expired"}
        assert errors.keys() == {"a", "b"} and ended.output_file_id is None


def test_files_are_off_without_a_folder_and_shared_by_several_models(tmp_path: Path, default_model_path: Path) -> None:
    with several_here(tmp_path, "--models-max", "2", a={}, b={}) as plain, client_of(plain) as client:
        with pytest.raises(openai.NotFoundError, match="--files-dir"):
            upload(client, b"x")
        with pytest.raises(openai.NotFoundError, match="--files-dir"):
            client.batches.list()
    (tmp_path / "other").mkdir()
    arguments = ("--models-max", "2", "--files-dir", str(tmp_path / "kept"))
    with several_here(tmp_path / "other", *arguments, a={}, b={}) as server, client_of(server) as client:
        batch = run_batch(client, request("a", model="a"), request("b", model="b"), request("c", model="c"))
        answers = results(client, batch.output_file_id)
        assert [answers[name]["response"]["body"]["model"] for name in "ab"] == ["a", "b"]
        assert results(client, batch.error_file_id)["c"]["response"]["body"]["error"]["code"] == "model_not_found"
