"""`quire bench kernels`: what it says where there is no GPU, and what it refuses. Its figures need a GPU."""

import pytest
import torch
from click.testing import CliRunner

from quire.cli.main import app

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: tests/gpu measures")


def test_without_a_gpu_it_says_so() -> None:
    refused = CliRunner().invoke(app, ["bench", "kernels"])
    assert refused.exit_code != 0 and "no GPU" in str(refused.exception or refused.output)


def test_heads_that_do_not_divide() -> None:
    refused = CliRunner().invoke(app, ["bench", "kernels", "--heads", "10", "--kv-heads", "4"])
    assert refused.exit_code == 2 and "10" in refused.output and "4" in refused.output
