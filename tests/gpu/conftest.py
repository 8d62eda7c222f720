"""These tests need a GPU that torch can use; elsewhere they skip and say so."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU on this machine")
