"""Which chunks go to the kernel for Hopper, and that steps are right without it. It is itself tested in tests/gpu."""

import logging
from dataclasses import replace

import pytest
import torch
from triton import knobs

from quire.kernels.gpu import hopper_support
from quire.kernels.gpu.attention import hopper_dispatch
from quire.kernels.gpu.attention.dispatch import GpuAttention
from quire.kernels.gpu.attention.hopper_dispatch import HopperPrefill
from quire.kernels.interface import AttentionRule
from tests.kernels.layouts import Part
from tests.kernels.test_gpu_attention import Step
from tests.kernels.without_gluon import without_gluon

NUM_SMS = 132
PLAIN = AttentionRule(0.1)


def takes(
    tokens: int = 1024,
    heads: int = 32,
    kv_heads: int = 8,
    dim: int = 128,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    rule: AttentionRule = PLAIN,
    gathered: bool = False,
) -> bool:
    query = torch.empty(tokens, heads + 2 * kv_heads, dim, dtype=dtype, device="meta")[:, :heads]
    kv_layer = torch.empty(9, 2, 2, block_size, kv_heads, dim, dtype=dtype, device="meta")[:, 1]
    return HopperPrefill(NUM_SMS).takes(query, kv_layer, rule, tokens, gathered=gathered)


def test_common_shapes_are_supported() -> None:
    for dim in (40, 64, 80, 96, 128, 192, 256):
        for group in (1, 2, 3, 4, 5, 7, 8, 16):
            for block_size in (8, 16, 32, 64):
                assert takes(4096, 8 * group, 8, dim, block_size), (dim, group, block_size)
    assert takes(heads=71, kv_heads=1, dim=64), "more query heads than half a tile has rows"
    assert takes(block_size=128)
    assert takes(dtype=torch.float16)
    assert takes(rule=replace(PLAIN, window=64, softcap=5.0))


def test_unsupported_shapes_go_to_the_portable_kernels() -> None:
    for dim in (32, 100, 264, 512):
        assert not takes(dim=dim)
    for block_size in (1, 4, 24, 256):
        assert not takes(block_size=block_size)
        assert takes(block_size=block_size, gathered=True), "what was gathered lies in no block"
    assert not takes(dim=256, block_size=128), "a block that is larger than a tile of keys"
    assert not takes(block_size=128, rule=replace(PLAIN, window=512))
    assert takes(block_size=128, rule=replace(PLAIN, window=513))
    assert not takes(dtype=torch.float32)


def test_few_tokens_go_to_the_split_kv_kernels() -> None:
    """256 tokens of 32 query heads are 64 tiles: less than half of the processors would have one."""
    assert not takes(256)
    assert takes(288)


def test_a_store_with_unequal_strides_goes_to_the_portable_kernels() -> None:
    query = torch.empty(1024, 32, 128, dtype=torch.bfloat16, device="meta")
    store = torch.empty(9, 2, 2, 16, 8, 136, dtype=torch.bfloat16, device="meta")[..., :128]
    assert not HopperPrefill(NUM_SMS).takes(query, store[:, 1], PLAIN, 1024)


def test_there_is_no_hopper_kernel_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even on a Hopper GPU; without the interpreter there is one, and on a later GPU none again."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    properties = type("Properties", (), {"multi_processor_count": NUM_SMS})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(knobs.runtime, "interpret", True)
    assert HopperPrefill.find() is None
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    assert HopperPrefill.find() is not None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert HopperPrefill.find() is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, and the kernel may be compiled for it")
def test_a_kernel_that_does_not_compile_is_logged_once_and_steps_are_correct(
    caplog: pytest.LogCaptureFixture,
) -> None:
    hopper = HopperPrefill(1)
    step = Step([Part(30, 1), Part(7, 20), Part(0, 10)], group=2, kv_heads=1, dim=64, dtype=torch.float16)
    for _ in range(2):
        step.check(GpuAttention(step.layout, 1, hopper=hopper).attend(step.query, step.kv_layer, step.rule))
    [line] = caplog.records
    assert line.levelno == logging.WARNING and "portable kernels" in line.message
    assert "\n" not in line.message


def test_an_invalidated_capture_does_not_mark_the_kernel_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken_off(*given: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(hopper_support, "_is_capturing", lambda: True)
    monkeypatch.setattr(hopper_dispatch, "hopper_attention", broken_off)
    hopper = HopperPrefill(1)
    step = Step([Part(7, 20)], group=2, kv_heads=1, dim=64, dtype=torch.float16)
    with pytest.raises(RuntimeError, match="during capture"):
        GpuAttention(step.layout, 0, hopper=hopper).attend(step.query, step.kv_layer, step.rule)
    assert hopper.takes(step.query, step.kv_layer, step.rule, 20)


def test_a_triton_without_gluon_is_logged_and_the_kernel_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    without = without_gluon(monkeypatch, hopper_dispatch, "quire.kernels.gpu.attention.hopper")
    assert without.HopperPrefill.find() is None
    [line] = caplog.records
    assert "triton.experimental.gluon" in line.message
