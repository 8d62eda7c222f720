"""The kustomizations of deploy/kubernetes, built as kustomize would: what they apply fits together and fits quire."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.server.app import ENDPOINTS
from tests.architecture.tree import ROOT
from tests.deploy.files import DEPLOY, documents

KUBERNETES = DEPLOY / "kubernetes"
VARIANTS = (".", "autoscaling", "router")
PATHS = {endpoint.path for endpoint in ENDPOINTS} | {"/health"}
Resource = dict[str, Any]


def built(variant: str) -> list[Resource]:
    """The resources of a kustomization: its files, those of the ones below it, and its patches."""
    folder = (KUBERNETES / variant).resolve()
    (own,) = documents(folder.relative_to(DEPLOY) / "kustomization.yaml")
    assert set(own) <= {"apiVersion", "kind", "resources", "patches", "images"}, "what this reads"
    found: list[Resource] = []
    for name in own["resources"]:
        path = (folder / name).resolve()
        found += built(str(path.relative_to(KUBERNETES))) if path.is_dir() else documents(path.relative_to(DEPLOY))
    for patch in own.get("patches", ()):
        (target,) = [each for each in found if named(each) == (patch["target"]["kind"], patch["target"]["name"])]
        change = yaml.safe_load(patch["patch"])
        if isinstance(change, dict):
            assert change.pop("$patch") == "delete" and named(change) == named(target)
            found.remove(target)
        else:
            for operation in change:
                apply(target, **operation)
    return found


def apply(target: Resource, op: str, path: str, value: object = None) -> None:
    """One operation of a JSON patch; what it replaces or removes must be there."""
    *parents, last = [int(part) if part.isdecimal() else part for part in path.split("/")[1:]]
    place: Any = target
    for part in parents:
        place = place[part]
    assert op in ("remove", "replace") and place[last] is not None
    if op == "remove":
        del place[last]
    else:
        place[last] = value


def named(resource: Resource) -> tuple[str, str]:
    return resource["kind"], resource["metadata"]["name"]


def pods(resources: list[Resource]) -> dict[str, Resource]:
    return {
        name: each["spec"]["template"] for each in resources for kind, name in [named(each)] if kind == "Deployment"
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_are_given_once_and_every_selector_finds_its_pods(variant: str) -> None:
    resources = built(variant)
    names = [named(each) for each in resources]
    assert len(set(names)) == len(names)
    labels = [pod["metadata"]["labels"] for pod in pods(resources).values()]
    for each in resources:
        if each["kind"] in ("Service", "PodDisruptionBudget", "Deployment"):
            selector = each["spec"]["selector"]
            selector = selector.get("matchLabels", selector)
            assert sum(selector.items() <= own.items() for own in labels) == 1, named(each)
    [budget] = [each for each in resources if each["kind"] == "PodDisruptionBudget"]
    assert budget["spec"]["maxUnavailable"] == 1, "minAvailable would block the drain of a node with the only pod"


@pytest.mark.parametrize("variant", VARIANTS)
def test_pods_are_locked_down_probed_and_bounded(variant: str) -> None:
    for name, pod in pods(built(variant)).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] >= 10000, name
        (container,) = spec["containers"]
        limits = container["securityContext"]
        assert limits["readOnlyRootFilesystem"] and not limits["allowPrivilegeEscalation"]
        assert limits["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"] and container["resources"]["requests"].keys() == {
            "cpu",
            "memory",
        }
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        flags = dict(arg.removeprefix("--").partition("=")[::2] for arg in container["args"] if arg.startswith("--"))
        assert ports == {"http": int(flags["port"])} and flags["host"] == "0.0.0.0"
        for probe in (value for key, value in container.items() if key.endswith("Probe")):
            assert probe["httpGet"]["port"] == "http" and probe["httpGet"]["path"] in PATHS
        mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
        assert mounted == {volume["name"] for volume in spec.get("volumes", ())}, name


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_claim_and_service_that_is_named_exists(variant: str) -> None:
    resources = built(variant)
    names = {named(each) for each in resources}
    for pod in pods(resources).values():
        for volume in pod["spec"].get("volumes", ()):
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in names
        if account := pod["spec"].get("serviceAccountName"):
            assert ("ServiceAccount", account) in names
    claims = [each for each in resources if each["kind"] == "PersistentVolumeClaim"]
    assert len(claims) == (variant == "."), "several pods cannot share a disk that one of them mounts"


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_the_scaler_counts_what_quire_measures(variant: str) -> None:
    resources = built(variant)
    [scaler] = [each for each in resources if each["kind"] == "HorizontalPodAutoscaler"]
    target = scaler["spec"]["scaleTargetRef"]
    [deployment] = [each for each in resources if named(each) == (target["kind"], target["name"])]
    assert "replicas" not in deployment["spec"], "each apply would undo what the scaler has chosen"
    [metric] = scaler["spec"]["metrics"]
    name = metric["pods"]["metric"]["name"]
    source = (ROOT / "src" / "quire" / "server" / "metrics.py").read_text()
    assert f'_gauge("{name.removeprefix("quire_")}"' in source
    assert 1 < scaler["spec"]["minReplicas"] < scaler["spec"]["maxReplicas"]


def test_the_router_looks_for_the_pods_of_quire() -> None:
    resources = built("router")
    own = pods(resources)
    (router,) = own["quire-router"]["spec"]["containers"]
    (quire,) = own["quire"]["spec"]["containers"]
    flags = dict(arg.removeprefix("--").partition("=")[::2] for arg in router["args"])
    label, _, value = flags["selector"].partition("=")
    assert own["quire"]["metadata"]["labels"][label] == value
    assert int(flags["service-discovery-port"]) == quire["ports"][0]["containerPort"]
    [role] = [each for each in resources if each["kind"] == "Role"]
    assert role["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def test_every_file_is_of_a_variant() -> None:
    used = {path for variant in VARIANTS for path in files_of(KUBERNETES / variant)}
    assert used == {path.resolve() for path in KUBERNETES.rglob("*.yaml")}


def files_of(folder: Path) -> list[Path]:
    (own,) = documents((folder / "kustomization.yaml").relative_to(DEPLOY).as_posix())
    named_here = [(folder / name).resolve() for name in own["resources"]]
    return [(folder / "kustomization.yaml").resolve(), *(path for path in named_here if path.suffix)]
