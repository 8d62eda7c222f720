"""Kernels divide their work among threads: here there are two to divide it among."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="module")
def _two_threads() -> None:
    torch.set_num_threads(2)
