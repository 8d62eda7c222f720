"""What is shipped for operators fits what quire is: flags, routes, files, users, times. Nothing is built here."""

import re
import shutil
import tomllib

import pytest

from quire.server.app import ENDPOINTS
from tests import children
from tests.architecture.tree import ROOT
from tests.deploy.files import DEPLOY, commands, documents, exists, serve_help, shutdown_s, stages, unit

PATHS = {endpoint.path for endpoint in ENDPOINTS}


@pytest.mark.parametrize("place", ["Dockerfile", "systemd", "kubernetes"])
def test_every_flag_is_one_that_serve_has(place: str) -> None:
    words = commands()[place]
    assert words[0] == "serve"
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert flags
    known = set(re.findall(r"--[a-z][a-z-]+", serve_help()))
    assert flags <= known


@pytest.mark.parametrize("place", ["Dockerfile", "systemd", "kubernetes"])
def test_every_deployment_has_keys(place: str) -> None:
    words = " ".join(commands()[place])
    assert "--api-key-file" in words and "--insecure-no-key" not in words and "--api-key " not in words


@pytest.mark.parametrize("stage", ["cpu", "cuda"])
def test_an_image_does_not_run_as_root(stage: str) -> None:
    user = [each.rest for each in stages()[stage].instructions if each.word == "USER"][-1]
    assert user.partition(":")[0] not in ("root", "0")


def test_a_plain_build_makes_the_cpu_image() -> None:
    assert list(stages())[-1] == "cpu"


def test_what_the_image_copies_is_there_and_not_ignored() -> None:
    let_in = [line[1:] for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines() if line[:1] == "!"]
    sources = []
    for stage in stages().values():
        for each in stage.instructions:
            if each.word == "COPY" and "--from=" not in each.rest:
                sources += each.rest.split()[:-1]
    assert {"pyproject.toml", "src"} <= set(sources)
    assert [source for source in sources if not exists(source, ROOT) or source not in let_in] == []


def test_no_secret_is_baked_into_an_image() -> None:
    for stage in stages().values():
        for each in stage.instructions:
            assert each.word not in ("ENV", "ARG") or not re.search(r"(?i)key|token|secret|passw", each.rest), each


def test_the_image_keeps_its_caches_in_its_volume_and_is_watched() -> None:
    base = stages()["cpu"].instructions
    (volume,) = [each.rest for each in base if each.word == "VOLUME"]
    settings = dict(word.split("=", 1) for each in base if each.word == "ENV" for word in each.rest.split())
    assert all(settings[name].startswith(volume) for name in ("XDG_CACHE_HOME", "HF_HOME"))
    (check,) = [each.rest for each in base if each.word == "HEALTHCHECK"]
    assert re.findall(r":8000(/[a-z]+)", check) == ["/health"] and "/health" in PATHS


def test_compose_names_only_what_it_defines_and_what_exists() -> None:
    (compose,) = documents("compose.yaml")
    assert set(compose["services"]) == {"quire", "prometheus", "grafana"}
    for name, service in compose["services"].items():
        assert ("image" in service) != ("build" in service), name
        assert set(service.get("secrets", ())) <= set(compose["secrets"])
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), name
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            assert exists(source) if source.startswith(".") else source in compose["volumes"], volume
    assert all(secret["file"].startswith("./secrets/") for secret in compose["secrets"].values())
    assert "secrets/" in (DEPLOY / ".gitignore").read_text().splitlines()
    build = compose["services"]["quire"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == (DEPLOY / "Dockerfile").resolve()


def test_the_stop_timeout_exceeds_the_drain_time() -> None:
    (compose,) = documents("compose.yaml")
    told = commands()
    grace_s = float(compose["services"]["quire"]["stop_grace_period"].removesuffix("s"))
    assert grace_s > shutdown_s(told["Dockerfile"])
    assert float(unit()["Service"]["TimeoutStopSec"]) > shutdown_s(told["systemd"])
    pod = deployment()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    pause_s = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > pause_s + shutdown_s(told["kubernetes"])


def deployment() -> dict[str, object]:
    return next(each for each in documents("kubernetes/quire.yaml") if each["kind"] == "Deployment")


def test_the_pod_is_probed_where_quire_answers_and_finds_its_volumes() -> None:
    pod = deployment()["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    probes = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"startupProbe": "/ready", "readinessProbe": "/ready", "livenessProbe": "/health"}
    assert set(probes.values()) <= PATHS
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"] and container["securityContext"]["readOnlyRootFilesystem"]
    user = next(each.rest for each in reversed(stages()["cpu"].instructions) if each.word == "USER")
    assert str(pod["securityContext"]["runAsUser"]) == user.partition(":")[0]
    claims = [each["metadata"]["name"] for each in documents("kubernetes/quire.yaml") if "Claim" in each["kind"]]
    assert [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"] if "persistentVolumeClaim" in v] == claims
    service = next(each for each in documents("kubernetes/quire.yaml") if each["kind"] == "Service")
    assert service["spec"]["selector"].items() <= deployment()["spec"]["template"]["metadata"]["labels"].items()


def test_the_unit_is_hardened_and_comes_back() -> None:
    service = unit()["Service"]
    assert (service["Type"], service["Restart"], service["KillMode"]) == ("exec", "on-failure", "mixed")
    for setting in ("DynamicUser", "NoNewPrivileges", "ProtectHome", "PrivateTmp", "LockPersonality"):
        assert service[setting] == "yes"
    assert service["ProtectSystem"] == "strict" and service["LoadCredential"].startswith("keys:")
    assert "%d/keys" in service["ExecStart"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
def test_systemd_reports_only_that_quire_is_not_installed() -> None:
    command = ["systemd-analyze", "verify", str(DEPLOY / "systemd" / "quire.service")]
    said = children.run(command, capture_output=True, text=True, check=False).stderr
    ours = [line for line in said.splitlines() if line.startswith(("quire.service", str(DEPLOY)))]
    assert all("/opt/quire/bin/quire is not executable" in line for line in ours), ours


def test_the_proxy_holds_nothing_back() -> None:
    text = (DEPLOY / "nginx" / "quire.conf").read_text()
    settings = re.sub(r"#.*", "", text)
    assert settings.count("{") == settings.count("}")
    for line in ("proxy_buffering off;", "proxy_http_version 1.1;", "gzip off;", "proxy_next_upstream off;"):
        assert line in settings
    assert re.search(r"client_max_body_size 16m;", settings) and "default: 16MiB" in serve_help().replace("\n", " ")


def test_the_ray_files_name_options_a_function_and_an_extra_that_exist() -> None:
    (served,), (cluster,) = documents("ray/serve.yaml"), documents("ray/cluster.yaml")
    (described,) = served["applications"]
    options = {f"--{name}" for name in described["args"] if name != "model"}
    assert options <= set(re.findall(r"--[a-z][a-z-]+", serve_help())) and "--api-key-file" in options
    module, _, function = described["import_path"].partition(":")
    source = (ROOT / "src" / module.replace(".", "/")).with_suffix(".py").read_text()
    assert f"\ndef {function}(config" in source
    (extra,) = {each for line in cluster["setup_commands"] for each in re.findall(r"quire\[(\w+)\]", line)}
    assert extra in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert cluster["min_workers"] <= cluster["max_workers"] == len(cluster["provider"]["worker_ips"])


def test_the_readme_shows_every_file() -> None:
    shown = (DEPLOY / "README.md").read_text()
    files = [path.relative_to(DEPLOY).as_posix() for path in DEPLOY.rglob("*.*") if path.parent.name != "secrets"]
    ours = [name for name in files if not name.startswith(("grafana/provisioning", ".", "README")) and "." in name]
    assert [name for name in ours if name not in shown and name != "Dockerfile.dockerignore"] == []
