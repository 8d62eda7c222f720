"""The sdist and the wheel made from it: installed into an environment of their own, they serve. Torch is borrowed."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from quire.kernels.cpu.native_build import SOURCES, find_library, known_variants
from quire.version import __version__
from tests import children
from tests.architecture.tree import ROOT
from tests.clients.client_server import scripted

FOUND = [library for variant in known_variants() if (library := find_library(variant)) is not None]


class Distribution(NamedTuple):
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def distribution(tmp_path_factory: pytest.TempPathFactory) -> Distribution:
    """The wheel is made from the sdist alone, with the CPU kernels that are here already: CXX compiles no others."""
    folder = tmp_path_factory.mktemp("distribution")
    build(ROOT, "sdist", folder)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    tree = folder / f"quire-{__version__}"
    for library in FOUND:
        shutil.copy(library, tree / SOURCES.relative_to(ROOT) / library.name)
    build(tree, "wheel", folder)
    (wheel,) = folder.glob("*.whl")
    return Distribution(sdist, wheel)


def build(tree: Path, target: str, folder: Path) -> None:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(folder)]
    environment = {**os.environ, "CXX": "true"}
    children.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=True)


def test_the_sdist_has_the_sources_and_nothing_built(distribution: Distribution) -> None:
    with tarfile.open(distribution.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "hatch_build.py", "LICENSE", "README.md", "src/quire/kernels/cpu/native/api.cpp"} <= names
    assert not [name for name in names if name.endswith((".so", ".pyc")) or name.startswith((".venv", "site/"))]


def test_the_wheel_has_every_file_of_the_package(distribution: Distribution) -> None:
    with zipfile.ZipFile(distribution.wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("quire/")}
    ignored = {"__pycache__", ".so", ".pyc"}
    files = {
        path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src" / "quire").rglob("*") if path.is_file()
    }
    wanted = {name for name in files if not any(part in name for part in ignored)}
    assert wanted | {f"quire/kernels/cpu/native/{library.name}" for library in FOUND} == names


def test_an_editable_install_has_bytecode_even_where_python_writes_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(ROOT / "hatch_build.py", tmp_path)
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("CXX", "true")
    code = """
import os
from hatch_build import NativeKernelsHook
hook = NativeKernelsHook(os.getcwd(), {}, None, None, "dist", "wheel")
hook.initialize("editable", {"artifacts": []})
"""
    children.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    compiled = {importlib.util.source_from_cache(str(path)) for path in (tmp_path / "src").rglob("*.pyc")}
    assert compiled == {str(path) for path in (tmp_path / "src").rglob("*.py")}


def test_an_installed_wheel_serves(
    distribution: Distribution, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_model_path: Path
) -> None:
    venv = tmp_path / "venv"
    children.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--no-compile",
    ]
    children.run([*pip, str(distribution.wheel)], check=True, stderr=subprocess.DEVNULL)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(
        sysconfig.get_path("purelib") + "\n"
    )  # torch and the others, not our checkout
    for name in ("PYTHONPATH", "PYTHONHOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    version = children.run([str(venv / "bin" / "quire"), "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith(f"quire {__version__}\n")
    where = children.run([str(python), "-c", "import quire; print(quire.__file__)"], capture_output=True, text=True)
    assert Path(where.stdout.strip()).is_relative_to(packages)
    monkeypatch.setattr("tests.clients.client_server.QUIRE", str(venv / "bin" / "quire"))
    with scripted(tmp_path, [{"say": "From the wheel."}]) as url:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "From the wheel."
        page = httpx.get(f"{url}/").text
        for part in re.findall(r'(?:src|href)="([^"#]+\.(?:js|css))"', page):
            assert httpx.get(f"{url}/{part.lstrip('/')}").status_code == 200, part


def test_packages_that_windows_and_macs_lack_are_marked() -> None:
    """So that pip installs the rest there, and quire itself says what does not work."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (uvloop,) = [line for line in extras["serve"] if line.startswith("uvloop")]
    (triton,) = [line for line in extras["gpu"] if line.startswith("triton")]
    assert extras["cpu"] == [line for line in extras["gpu"] if line.startswith("torch")] == project["dependencies"][:1]
    assert uvloop.endswith("; platform_system != 'Windows'") and triton.endswith("; platform_system == 'Linux'")
