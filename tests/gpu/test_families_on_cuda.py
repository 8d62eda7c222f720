"""Every family on the GPU against transformers there: whole prompts, token by token, in chunks, and half precision."""

from collections.abc import Iterator

import pytest
import torch

from quire.kernels.gpu.kernels import GpuKernels
from quire.models.decoder import Decoder
from tests.models.families import FAMILIES, Family, build
from tests.models.running import Schedule, in_chunks, run
from tests.models.test_decoder import LENGTHS, prompts

SCHEDULES: dict[str, Schedule] = {
    "whole": [dict(enumerate(LENGTHS))],
    "token by token": in_chunks(LENGTHS, 1),
    "in chunks": in_chunks(LENGTHS, 7),
}


@pytest.fixture(autouse=True)
def _whole_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32  # no attribute that monkeypatch could delete and restore
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_float32_gives_the_same_logits(family: Family) -> None:
    twin = build(family, device="cuda")
    with torch.inference_mode():
        expected = [twin.peer(torch.tensor([prompt], device="cuda")).logits[0].float() for prompt in prompts(LENGTHS)]
    for schedule in SCHEDULES.values():
        ours = run(Decoder(twin.spec, twin.weights, GpuKernels(), 32), prompts(LENGTHS), schedule, device="cuda")
        for mine, theirs in zip(ours, expected, strict=True):
            assert (mine - theirs).abs().max().item() <= 2e-4


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_bfloat16_is_no_further_from_float32_than_transformers(family: Family) -> None:
    whole, half = build(family, device="cuda"), build(family, torch.bfloat16, device="cuda")
    schedule = SCHEDULES["in chunks"]
    ours = run(Decoder(half.spec, half.weights, GpuKernels(), 32), prompts(LENGTHS), schedule, device="cuda")
    mine = theirs = 0.0
    for logits, prompt in zip(ours, prompts(LENGTHS), strict=True):
        with torch.inference_mode():
            tokens = torch.tensor([prompt], device="cuda")
            truth, peer = whole.peer(tokens).logits[0].float(), half.peer(tokens).logits[0].float()
        mine += (logits - truth).abs().mean().item()
        theirs += (peer - truth).abs().mean().item()
    assert mine <= 1.25 * theirs
