"""The pages: served without a key, from this server alone, with a policy that lets no script stand in a page."""

import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urljoin

import httpx
import pytest

from quire.server.app import ADMIN, ENDPOINTS, STATIC_ROUTES
from quire.server.examples import EXAMPLES
from quire.server.static_files import FOLDER, PAGES
from tests.server.api_server import scripted_server

KEY = "sk-page-test"


@pytest.fixture(scope="module")
def client(default_model_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    with (
        scripted_server(
            tmp_path_factory.mktemp("pages"), [{"say": '{"name": "Ada", "age": 36}'}], "--api-key", KEY
        ) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize("path", STATIC_ROUTES)
def test_a_page_and_its_files_need_no_key(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    assert client.head(path).status_code == 200
    again = client.get(path, headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_the_apis_behind_the_pages_still_need_a_key(client: httpx.Client) -> None:
    for endpoint in ENDPOINTS:
        if endpoint.path in ("/health", "/ready") or (endpoint.method, endpoint.path) == ("GET", "/"):
            continue
        path = (
            endpoint.path.replace("{name:path}", "x")
            .replace("{response_id}", "x")
            .replace("{request_id}", "x")
            .replace("{number}", "1")
        )
        assert client.request(endpoint.method, path, json={}).status_code == 401, path
    for path in (*STATIC_ROUTES, "/openapi.json"):
        assert client.post(path, json={}).status_code == 401, path
    assert client.get("/openapi.json").status_code == 401


@pytest.mark.parametrize("before", ["", "/.", "/pages/..", "/docs/..", "//", "/pages/%2e%2e"])
@pytest.mark.parametrize("after", ["", "/", "%00", "/../x", ";x", "%2f"])
def test_only_the_exact_paths_are_open(client: httpx.Client, before: str, after: str) -> None:
    connection = http.client.HTTPConnection(client.base_url.host, client.base_url.port or 0)  # sends a path as it is
    for path in ("/pages/chat.js", "/v1/models", "/metrics"):
        sent = before + path + after
        connection.request("GET", sent)
        response = connection.getresponse()
        response.read()
        assert (response.status == 200) == (sent in STATIC_ROUTES), sent
    connection.close()


def references(text: str, kind: str) -> list[str]:
    if kind == ".html":
        return re.findall(r'(?:src|href)="([^"]*)"', text)
    if kind == ".js":
        return re.findall(r'(?:from|import\()\s*"([^"]+)"', text) + re.findall(r'request\("([^"]+)"', text)
    return re.findall(r"(?:url\(|@import)([^)]*)", text)


def test_pages_load_only_files_of_this_server(client: httpx.Client) -> None:
    """By relative addresses: behind a path of a proxy they work, too."""
    own = [path for path in STATIC_ROUTES if "/vendor/" not in path and not path.endswith((".txt", ".svg"))]
    keyed = {"authorization": f"Bearer {KEY}"}
    num_found = 0
    for path in own:
        text = client.get(path).text
        assert not re.findall(r"https?://(?!\\)[a-z]", text), f"{path} names another host"
        for reference in references(text, Path(STATIC_ROUTES[path]).suffix):
            assert not reference.startswith(("/", "http", "data:")), (path, reference)
            base = "/" if reference.startswith("v1/") or not reference.startswith((".", "pages")) else path
            target = urljoin(base, reference)
            if (path, reference) == ("/pages/replay.js", "replay"):
                continue  # of `quire replay --view`
            assert client.get(target, headers=keyed).status_code in (200, 405), (path, reference)
            num_found += 1
    assert num_found > 15


def test_pages_have_no_script_or_style_inside() -> None:
    for name in PAGES.values():
        text = (FOLDER / name).read_text()
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*src=)", text), name


def test_scripts_never_parse_html() -> None:
    for path in FOLDER.glob("*.js"):
        text = re.sub(r"^\s*//.*$", "", path.read_text(), flags=re.MULTILINE)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", text), (
            path.name
        )


def test_every_vendored_file_has_its_licence() -> None:
    licences = (FOLDER / "vendor" / "LICENSES.txt").read_text()
    for path in (FOLDER / "vendor").glob("*.js"):
        assert f"({path.name})" in licences
    assert licences.count("Permission is hereby granted") >= 2 and "Redistribution and use" in licences


def test_the_state_of_the_engine_is_for_those_who_may_read_metrics(client: httpx.Client) -> None:
    keyed = {"authorization": f"Bearer {KEY}"}
    assert client.get("/engine/state").status_code == 401
    client.post("/v1/completions", json={"prompt": "x", "max_tokens": 4}, headers=keyed)
    view = client.get("/engine/state", headers=keyed).json()
    assert view["num_blocks"] == len(view["states"]) or len(view["states"]) <= 2048
    client.post("/v1/completions", json={"prompt": "x y z", "max_tokens": 4}, headers=keyed)
    later = client.get(f"/engine/state?since={view['step']}", headers=keyed).json()
    assert later["steps"] and all(step["step"] > view["step"] for step in later["steps"])
    for wrong in ("x", "1.5", "9" * 30, "-", "--1"):
        refusal = client.get("/engine/state", params={"since": wrong}, headers=keyed)
        assert refusal.status_code == 400 and "since must be" in refusal.json()["error"]["message"]
    assert client.get("/engine/requests/0/explain", headers=keyed).status_code == 403, (
        "stories of requests are for the admin"
    )


def test_a_request_is_explained_by_its_number_on_ones_own_machine(
    default_model_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with (
        scripted_server(tmp_path_factory.mktemp("open"), [{"say": "hello"}]) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}).status_code == 200
        story = client.get("/engine/requests/0/explain")
        assert story.status_code == 200 and any("arrived" in line for line in story.json()["lines"]), story.text
        assert client.get("/engine/requests/abc/explain").status_code == 404
        assert client.get("/engine/requests/99/explain").status_code == 404


ALL_EXAMPLES = [(path, name) for path, examples in EXAMPLES.items() for name in examples]


@pytest.mark.parametrize(
    "path, name", [each for each in ALL_EXAMPLES if each[0] not in {endpoint.path for endpoint in ADMIN}]
)
def test_every_example_of_the_openapi_document_works(client: httpx.Client, path: str, name: str) -> None:
    response = client.post(path, json=EXAMPLES[path][name], headers={"authorization": f"Bearer {KEY}"})
    if path == "/infill":  # tests/server/llamacpp has a model with such tokens
        assert response.status_code == 400 and "fill-in-the-middle" in response.text
    elif path == "/v1/batches":  # tests/server/openai has a server with files
        assert response.status_code == 404 and "--files-dir" in response.text
    else:
        assert response.status_code == 200, response.text


def test_the_openapi_document_has_an_example_of_every_body(client: httpx.Client) -> None:
    document = client.get("/openapi.json", headers={"authorization": f"Bearer {KEY}"}).json()
    for path, methods in document["paths"].items():
        for operation in methods.values():
            if "requestBody" in operation:
                assert operation["requestBody"]["content"]["application/json"]["examples"], path
    assert json.dumps(document).count('"examples"') == len(EXAMPLES)
