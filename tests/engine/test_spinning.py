"""Threads of kernels soon sleep, in every process that computes, unless the user chose otherwise."""

from pathlib import Path

import pytest

from quire.engine.child import Child
from quire.engine.spinning import brief_spins


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"])
def test_what_the_user_chose_stays(name: str) -> None:
    assert brief_spins({name: "7", "HOME": "x"}) == {name: "7", "HOME": "x"}


def test_an_engine_process_is_started_with_brief_spins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    child = Child(lambda said: None, lambda: None)
    try:
        environment = Path(f"/proc/{child.pid}/environ").read_bytes().split(b"\0")
        assert b"GOMP_SPINCOUNT=1000" in environment
    finally:
        child.kill()
        child.close()
