"""Engines that share a GPU through MPS: the priority of a prefill engine, and the check of a limited share."""

import os
from pathlib import Path

import pytest
import torch

from quire.config import EngineConfig
from quire.core.errors import ConfigError
from quire.engine import machine
from quire.engine.build import build
from quire.engine.machine import MPS_PRIORITY, MPS_SHARE, check_mps_share, lower_mps_priority, wrong_products
from quire.engine.prefix_transfer import EngineRole
from tests.llm.tiny import tiny_llama, write_model

CPU = torch.device("cpu")


@pytest.fixture
def small_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_PRODUCT_ROWS", (1, 16))
    monkeypatch.setattr(machine, "_PRODUCT_WIDTHS", (64, 256))


def test_the_environments_priority_stays() -> None:
    environment = {MPS_PRIORITY: "0"}
    lower_mps_priority(environment)
    assert environment == {MPS_PRIORITY: "0"}


@pytest.mark.parametrize(("role", "priority"), [(EngineRole.PREFILL, "1"), (EngineRole.DECODE, None)])
def test_a_prefill_engine_lowers_its_priority(
    role: EngineRole, priority: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MPS_PRIORITY, "0")  # so that what is set below is taken back at the end
    del os.environ[MPS_PRIORITY]
    write_model(tmp_path, tiny_llama())
    build(EngineConfig(model=str(tmp_path), device="cpu", max_num_seqs=4, kv_cache_memory=1 << 20), role=role)
    assert os.environ.get(MPS_PRIORITY) == priority


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_products_are_right(dtype: torch.dtype) -> None:
    assert wrong_products(CPU, dtype) == []


@pytest.mark.usefixtures("small_products")
@pytest.mark.parametrize("wrong", [float("nan"), 63.0])
def test_a_wrong_element_is_seen(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.mm

    def multiply(left: torch.Tensor, weights: torch.Tensor, *, out: torch.Tensor) -> None:
        right(left, weights, out=out)
        if left.shape == (16, 64):
            out[7, 5] = wrong

    monkeypatch.setattr(torch, "mm", multiply)
    assert wrong_products(CPU) == ["16 × 64 × 64"] * 3


@pytest.mark.usefixtures("small_products")
def test_an_element_that_is_not_written_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the memory has what an earlier product left there."""
    monkeypatch.setattr(torch, "mm", lambda left, weights, *, out: out[:, :-1].copy_(left @ weights[:, :-1]))
    assert len(wrong_products(CPU)) == 12


def test_a_share_with_wrong_products_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    monkeypatch.setattr(machine, "wrong_products", lambda device: ["64 × 4096 × 4096"])
    with pytest.raises(ConfigError, match=r"^CUDA_MPS_ACTIVE_THREAD_PERCENTAGE is '75', .* 1 of 36, .*such as 50"):
        check_mps_share({MPS_SHARE: "75"}, cuda)
    no_daemon = {"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)}
    check_mps_share(no_daemon, cuda)
    (tmp_path / "control").touch()
    with pytest.raises(ConfigError, match="is not set here"):  # its daemon may have been told a share
        check_mps_share(no_daemon, cuda)
    check_mps_share({MPS_SHARE: "75"}, CPU)
    monkeypatch.setattr(machine, "wrong_products", lambda device: [])
    check_mps_share({MPS_SHARE: "75"}, cuda)
