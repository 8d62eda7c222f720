"""Compiled kernels leave torch's number of threads as it was told. In processes of their own: numba starts once."""

import sys

import pytest

from quire.kernels.cpu.kernels import CpuKernels
from tests import children

PROGRAM = """
import torch
torch.set_num_threads(1)
from quire.kernels.cpu.kernels import CpuKernels
kernels = CpuKernels()
weight = torch.ones(64, 64, dtype=torch.bfloat16)
kernels.linear(torch.ones(2, 64, dtype=kernels.activation_dtype(weight.dtype)), kernels.pack(weight), None)
print(torch.get_num_threads())
"""


@pytest.mark.skipif(not CpuKernels().compiled, reason="numba is not installed")
def test_numba_does_not_change_torchs_thread_count() -> None:
    told = children.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert told.stdout.strip() == "1"
