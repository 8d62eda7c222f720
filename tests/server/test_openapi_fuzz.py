"""schemathesis against the server's OpenAPI document: no request, valid or not, causes a 500."""

from functools import cache
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from quire.server.app import ENDPOINTS, ERRORS, error_of, openapi
from tests.server.local_server import LocalServer
from tests.server.scripted_servers import check_control
from tests.server.server_process import wait_until_at_rest
from tests.tiers import examples, is_long

DESCRIBED = openapi(ENDPOINTS)
NUM_CASES = examples(60, 1000)
BODIED = [endpoint for endpoint in ENDPOINTS if endpoint.body is not None]
KINDS = [  # only with a body: the tests of access and protocol cover the others
    *((f"{endpoint.method} {endpoint.path}", mode) for endpoint in BODIED for mode in GenerationMode),
    *((f"{endpoint.method} {endpoint.path.replace(':path', '')}", GenerationMode.POSITIVE)
      for endpoint in ENDPOINTS if endpoint.in_schema and endpoint not in BODIED
      if endpoint.path != "/engine/events"),  # it has no end: tests/server/test_engine_events.py
]  # fmt: skip
CHOSEN = [kind for number, kind in enumerate(KINDS) if is_long() or number % 4 in (0, 3)]  # one mode of each, in turn


@cache
def schema() -> Any:
    return schemathesis.openapi.from_dict(DESCRIBED)


@cache
def cases_of(name: str, mode: GenerationMode) -> st.SearchStrategy[Case]:
    method, path = name.split()
    return schema()[path][method].as_strategy(generation_mode=mode)  # type: ignore[no-any-return]


def check_response(response: httpx.Response, error: str) -> None:
    late = response.status_code == 504 and response.json()["error"]["code"] == "deadline_expired"  # as requested
    assert response.status_code < 500 or late, response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/json"
        jsonschema.validate(response.json(), ERRORS[error])
        assert len(response.content) < 4096


def send(client: httpx.Client, case: Case) -> httpx.Response:
    transport: dict[str, Any] = case.as_transport_kwargs()
    return client.request(
        transport["method"],
        transport["url"],
        params=transport.get("params"),
        headers={name: str(value) for name, value in (transport.get("headers") or {}).items()},
        content=transport.get("data"),
        json=transport.get("json"),
    )


@pytest.mark.parametrize(("name", "mode"), CHOSEN, ids=lambda value: getattr(value, "value", value))
def test_no_request_causes_a_500(scripted_server: LocalServer, name: str, mode: GenerationMode) -> None:
    (error,) = {
        error_of(endpoint)
        for endpoint in ENDPOINTS
        if f"{endpoint.method} {endpoint.path.replace(':path', '')}" == name
    }
    with scripted_server.client() as client:

        @settings(
            max_examples=-(-NUM_CASES // (2 * len(BODIED))),
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=cases_of(name, mode))
        def fuzz(case: Case) -> None:
            check_response(send(client, case), error)

        fuzz()
        check_control(client)
        wait_until_at_rest(client)
