"""The dashboard asks Prometheus only for what a running server tells it."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.deploy.files import DEPLOY, documents
from tests.server.local_server import local_server

BOARD = json.loads((DEPLOY / "grafana" / "quire.json").read_text())
EXPRESSIONS = [target["expr"] for panel in BOARD["panels"] for target in panel["targets"]]
SELECTOR = re.compile(r"(quire_[a-z0-9_]+)\{([^}]*)\}")


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path) -> Iterator[dict[str, set[str]]]:
    """Every sample of a server that answered and refused, with the names of its labels."""
    with local_server(tmp_path_factory.mktemp("board"), [{"say": "One two three."}]) as server:
        url = server.url
        for path, wish in (("/v1/completions", {"prompt": "count"}), ("/v1/completions", {"prompt": "a " * 9000})):
            httpx.post(url + path, json=wish, timeout=60)
        page = httpx.get(f"{url}/metrics", timeout=60).text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    yield found


def test_there_is_something_to_look_at() -> None:
    assert len(BOARD["panels"]) >= 13 and len(EXPRESSIONS) >= len(BOARD["panels"])
    assert len({panel["title"] for panel in BOARD["panels"]}) == len(BOARD["panels"])


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_uses_known_metrics(expression: str, labels: dict[str, set[str]]) -> None:
    names = set(re.findall(r"quire_[a-z0-9_]+", expression))
    selected = SELECTOR.findall(expression)
    assert names and names == {name for name, _ in selected}, "every metric is of the chosen job"
    assert names <= set(labels)
    assert expression.count("(") == expression.count(")")
    grouped = set(re.findall(r"by \((\w+)\)", expression))
    for name, selector in selected:
        wanted = set(re.findall(r"(\w+)(?:=|!=|=~)", selector)) | grouped
        assert wanted - {"job"} <= labels[name], name


@pytest.mark.parametrize("panel", BOARD["panels"], ids=[panel["title"] for panel in BOARD["panels"]])
def test_a_legend_names_labels_that_are_kept(panel: dict[str, list[dict[str, str]]]) -> None:
    for target in panel["targets"]:
        kept = set(re.findall(r"by \((\w+)\)", target["expr"]))
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= kept


def test_what_is_provisioned_fits_together() -> None:
    (compose,) = documents("compose.yaml")
    (sources,) = documents("grafana/provisioning/datasources/prometheus.yaml")
    (boards,) = documents("grafana/provisioning/dashboards/quire.yaml")
    (scraping,) = documents("prometheus/prometheus.yml")
    (source,) = sources["datasources"]
    assert source["url"] == "http://prometheus:9090" and "prometheus" in compose["services"]
    mounted = [volume.split(":")[1] for volume in compose["services"]["grafana"]["volumes"]]
    folder = boards["providers"][0]["options"]["path"]
    assert f"{folder}/quire.json" in mounted
    (job,) = scraping["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["quire:8000"]}] and job["metrics_path"] == "/metrics"
    secret = Path(job["authorization"]["credentials_file"]).name
    assert secret in compose["services"]["prometheus"]["secrets"]
