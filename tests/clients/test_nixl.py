"""The prefill/decode split over the real NIXL: two processes of this machine over TCP, and a server with the split.

NIXL has an environment of its own, behind the packages of this one.
"""

import os
import sys
from pathlib import Path

import pytest

from tests.architecture.tree import ROOT
from tests.chaos.conftest import Dice, Dose
from tests.chaos.test_split import long_context_model, run_under_faults
from tests.clients.environments import SCRIPTS, environment, errors, outcomes


@pytest.fixture(scope="module")
def nixl_settings() -> dict[str, str]:
    """Of the environment of processes that use NIXL."""
    try:
        home = environment("nixl", "--no-deps")  # it asks for torch, which is here
    except AssertionError as error:
        pytest.skip(f"NIXL could not be installed: {str(error)[-300:]}")
    (packages,) = home.glob("lib/python*/site-packages")
    path = os.pathsep.join((str(ROOT / "src"), str(packages)))
    return {"PYTHONPATH": path, "UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "NIXL_LOG_LEVEL": "WARN"}


@pytest.mark.timeout(300)  # the first run makes the environment
def test_two_processes_over_tcp(nixl_settings: dict[str, str]) -> None:
    settings = [f"{name}={value}" for name, value in nixl_settings.items()]
    command = ("env", *settings, sys.executable, str(SCRIPTS / "use_nixl.py"), "-", "-")
    assert errors(outcomes(*command)) == {}


@pytest.mark.timeout(600)
def test_a_split_server_answers_as_one_engine_under_kills(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    nixl_settings: dict[str, str],
    dose: Dose,
    dice: Dice,
) -> None:
    for name, value in nixl_settings.items():
        monkeypatch.setenv(name, value)
    folder = long_context_model(tmp_path)
    run_under_faults(folder, print, dose(60), dice, "--kv-transport", "nixl")
