"""JSON bombs against a real server: refused in bounded memory, and the next request works."""

import json
import threading

import httpx
import pytest

from tests.server.server_process import Running

MAX_BYTES = 16 << 20
MANY_OBJECTS = '{"a":[' + "{}," * (5 << 20) + "{}]}"  # one string of a body; decoded it would take 400 MB
DEEP = 100_000
BOMBS = {
    "brackets": b"[" * MAX_BYTES,
    "braces": b'{"a":' * (MAX_BYTES // 5),
    "a deep field": b'{"prompt":"hi","metadata":' + b"[" * DEEP + b"]" * DEEP + b"}",
    "deep messages": b'{"messages":' + b'[{"content":' * DEEP + b"1" + b"}]" * DEEP + b"}",
    "a huge integer": b'{"prompt":"hi","max_tokens":' + b"9" * (1 << 20) + b"}",
    "a huge seed": b'{"prompt":"hi","seed":' + b"9" * 5000 + b"}",
    "a huge exponent": b'{"prompt":"hi","temperature":1e' + b"9" * 1000 + b"}",
    "a long fraction": b'{"prompt":"hi","temperature":-0.' + b"1" * (1 << 20) + b"}",
    "a number that is none": b'{"prompt":"hi","temperature":NaN}',
    "infinity": b'{"prompt":"hi","temperature":Infinity}',
    "half a character": b'{"prompt":"\\ud800"}',
    "half a character in a name": b'{"prompt":"hi","\\udfff":1,"model":"\\ud83d"}',
    "bytes that are no text": b'{"prompt":"\xff\xfe\xc0\x80"}',
    "a zero byte": b'{"prompt":\x00}',
    "a body with a mark before it": b'\xef\xbb\xbf{"prompt":"hi"}',
    "UTF-16": '{"prompt":"hi"}'.encode("utf-16"),
    "many keys": b"{" + b",".join(b'"k%d":1' % number for number in range(300_000)) + b"}",
    "many ids": b'{"prompt":[' + b",".join([b"1"] * (1 << 20)) + b"]}",
    "many prompts": b'{"prompt":[' + b",".join([b'"a"'] * (1 << 20)) + b"]}",
    "many stops": b'{"prompt":"hi","stop":[' + b",".join([b'"a"'] * 100_000) + b"]}",
    "many biases": b'{"prompt":"hi","logit_bias":{' + b",".join(b'"%d":1' % n for n in range(200_000)) + b"}}",
    "many tools": b'{"messages":[{"role":"user","content":"hi"}],"tools":['
    + b",".join([b'{"type":"function","function":{"name":"f"}}'] * 2000)
    + b"]}",
    "a long text": b'{"prompt":"' + b"a " * (1 << 20) + b'"}',
    "a long chat": b'{"messages":[{"role":"user","content":"' + b"a " * (1 << 20) + b'"}]}',
    "one long word": b'{"prompt":"' + b"a" * (1 << 18) + b'"}',
    "many objects in the text of a schema": json.dumps(
        {"prompt": "hi", "structured_outputs": {"json": MANY_OBJECTS}, "messages": [{"role": "user", "content": "hi"}]}
    ).encode(),
    "many objects in the arguments of a call": json.dumps(
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": MANY_OBJECTS}}]}]}
    ).encode(),
    "many short arguments of calls": json.dumps(
        {"messages": [{"role": "assistant", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":[' + "{}," * 250 + "{}]}"}}
        ] * 1000}]}
    ).encode(),
    "a wide schema": json.dumps(
        {"prompt": "hi", "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {
            "type": "object", "properties": {f"p{n}": {"enum": list(range(50))} for n in range(3000)}}}}}
    ).encode(),
}  # fmt: skip
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize")


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_in_bounded_memory(server: Running, name: str) -> None:
    with server.client() as client:
        before_bytes = server.resident_bytes
        most_bytes, over = [before_bytes], threading.Event()

        def watch() -> None:
            while not over.wait(0.005):
                most_bytes[0] = max(most_bytes[0], server.resident_bytes)

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            responses = [_post(client, path, BOMBS[name]) for path in PATHS]
        finally:
            over.set()
            watching.join()
        assert all(response.status_code in (400, 413) for response in responses[:2]), [a.text for a in responses]
        assert responses[2].status_code in (200, 400, 413), "a text may be long where nothing is generated"
        assert all(len(response.content) < 4096 for response in responses[:2])
        assert server.resident_bytes - before_bytes < 64 << 20
        assert most_bytes[0] - before_bytes < 256 << 20, "while it was read"
        response = _post(client, "/v1/completions", b'{"prompt":"hi","max_tokens":1}')
        assert response.status_code == 200, response.text


def _post(client: httpx.Client, path: str, body: bytes) -> httpx.Response:
    return client.post(path, content=body, headers={"content-type": "application/json"})


def test_of_duplicate_fields_the_last_counts(server: Running) -> None:
    """As everywhere; the first has no effect."""
    with server.client() as client:
        body = b'{"prompt":"no","n":1000,"n":1,"prompt":"hi","max_tokens":1,"echo":true}'
        response = _post(client, "/v1/completions", body)
        assert response.status_code == 200, response.text
        (choice,) = response.json()["choices"]
        assert choice["text"].startswith("hi")
