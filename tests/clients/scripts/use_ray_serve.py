"""`quire.ray.app` under Ray Serve: `python use_ray_serve.py SCRIPT PORT` with RAY_ADDRESS.

Runs in the environment of Ray, with quire behind it; prints one JSON line per case, with the error if it had one.
"""

import json
import sys
import urllib.error
import urllib.request

from cases import main
from ray import serve

import quire.ray
from quire.core.errors import ConfigError

SCRIPT, PORT = sys.argv[1:3]
URL = f"http://127.0.0.1:{PORT}"
CONFIG = {"script": SCRIPT, "threads": 1, "max-model-len": "4k", "min_replicas": 1, "admin-key": "sk-admin"}


def post(path: str, body: dict[str, object], **headers: str) -> bytes:
    headers = {"content-type": "application/json", **headers}
    request = urllib.request.Request(URL + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return bytes(response.read())


def a_wrong_option_is_refused_in_one_sentence() -> None:
    for config, words in (
        ({"modell": "x"}, "modell"),
        ({"port": 1}, "Ray Serve listens"),
        ({"replicas": 2}, "--min-replicas 2"),
    ):
        try:
            quire.ray.app(config)
        except ConfigError as error:
            assert words in error.message, error.message
        else:
            raise AssertionError(f"{config} was accepted")


def a_request_is_answered_through_the_proxy() -> None:
    serve.start(http_options={"port": int(PORT)})
    serve.run(quire.ray.app(CONFIG), name="quire")
    reply = json.loads(post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}))
    assert reply["choices"][0]["message"]["content"] == "I see.", reply


def a_stream_is_answered_and_an_error_too() -> None:
    body = {"prompt": "endless", "max_tokens": 20, "stream": True}
    chunks = post("/v1/completions", body).split(b"\n\n")
    assert len(chunks) > 5 and b"[DONE]" in chunks[-2], chunks
    try:
        post("/v1/completions", {**body, "temperature": -1})
    except urllib.error.HTTPError as error:
        assert error.code == 400 and b"temperature" in error.read()
    else:
        raise AssertionError("a wrong temperature was accepted")


def the_engine_of_one_replica_is_replaced() -> None:
    assert json.loads(post("/rolling_restart", {}, **{"x-api-key": "sk-admin"})) == {"restarted": 1}
    a_request = {"prompt": "hi", "max_tokens": 4}
    assert json.loads(post("/v1/completions", a_request))["choices"][0]["text"].startswith("I see")


def the_application_is_healthy_and_ends() -> None:
    assert serve.status().applications["quire"].status == "RUNNING"
    serve.shutdown()


main(
    a_wrong_option_is_refused_in_one_sentence,
    a_request_is_answered_through_the_proxy,
    a_stream_is_answered_and_an_error_too,
    the_engine_of_one_replica_is_replaced,
    the_application_is_healthy_and_ends,
)
