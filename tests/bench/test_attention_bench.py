"""`quire bench kernels`: its steps, their bytes and products, and refused options. Its figures need a GPU."""

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from quire.bench import attention
from quire.bench.attention import HeadShape, KernelFigure, kernel_inputs
from quire.bench.attention_steps import (
    STANDARD_STEPS,
    AttentionStep,
    QuerySpan,
    decode_step,
    find_step,
    mixed_decode_step,
    prefill_step,
)
from quire.cli import bench_engine
from quire.cli.main import app
from quire.kernels.reference import ReferenceKernels

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: tests/gpu measures")


@without_gpu
def test_it_is_refused_without_a_gpu() -> None:
    refused = CliRunner().invoke(app, ["bench", "kernels", "--beside", "fa3"])
    assert refused.exit_code != 0 and "no GPU" in str(refused.exception or refused.output)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--heads", "10", "--kv-heads", "4"), ("10", "4")),
        (("--window", "-1"), ("-1",)),
        (("--beside", "flashinfer"), ("fa3", "torch")),
        (("--block-size", "512"), ("512", "256")),
        (("--dtype", "float32"), ("float32", "bfloat16")),
        (("--steps", "64x4096"), ("64x4096", "decode 64x4096")),
        (("--steps", "decode 8x64,chunk 1"), ("chunk 1", "2 tokens")),
        (("--steps", "decode 0x64"), ("decode 0x64", "1 row")),
        (("--steps", "decode 1x10..20"), ("decode 1x10..20", "2 rows")),
        (("--steps", "decode 3x20..10"), ("decode 3x20..10", "shorter comes first")),
        (("--steps", "chunks 100x100000"), ("10,000,000", "8,388,608")),
    ],
)
def test_options_that_cannot_be_measured_are_refused(arguments: tuple[str, ...], named: tuple[str, ...]) -> None:
    refused = CliRunner().invoke(app, ["bench", "kernels", *arguments])
    assert refused.exit_code == 2 and all(word in refused.output for word in named)


spans = st.lists(st.builds(QuerySpan, st.integers(0, 20), st.integers(1, 9)), min_size=1, max_size=3).map(tuple)


@given(spans, st.integers(0, 25))
def test_keys_and_scores_of_a_step_are_counted(spans: tuple[QuerySpan, ...], window: int) -> None:
    seen = [
        (number, query, key)
        for number, span in enumerate(spans)
        for query in range(span.num_before, span.length)
        for key in range(query + 1)
        if not window or query - key < window
    ]
    step = AttentionStep("", spans)
    assert step.num_scores(window) == len(seen)
    assert step.num_read(window) == len({(number, key) for number, _, key in seen})


def test_names_and_lengths() -> None:
    steps = (decode_step(8, 64), mixed_decode_step(3, 10, 30), prefill_step(1, 5), prefill_step(2, 5, 7))
    assert [step.name for step in steps] == [
        "decode 8x64", "decode 3x10..30", "chunk 5", "chunks 2x5+7",
    ]  # fmt: skip
    assert sorted(span.length for span in mixed_decode_step(3, 10, 30).spans) == [10, 20, 30]
    assert len({step.name for step in STANDARD_STEPS}) == len(STANDARD_STEPS)
    assert all(step.decodes or all(span.num_new > 1 for span in step.spans) for step in STANDARD_STEPS)


def test_a_step_is_found_by_its_name_in_the_table() -> None:
    for step in (
        *STANDARD_STEPS,
        decode_step(24, 700),
        mixed_decode_step(9, 10, 2000),
        prefill_step(1, 300, 5000),
        prefill_step(3, 40),
        decode_step(1, 1),
    ):
        assert find_step(step.name) == step
    assert find_step("chunks 1x300") == prefill_step(1, 300)


@pytest.mark.parametrize("size", [16, 32])
@pytest.mark.parametrize(
    "step", [mixed_decode_step(5, 3, 70), prefill_step(2, 9, 40), prefill_step(1, 33)], ids=lambda step: step.name
)
def test_every_sequence_has_its_own_keys(step: AttentionStep, size: int) -> None:
    """Paged attention equals attention over the contiguous keys of each sequence."""
    shape = HeadShape(4, 2, 16, window=20, dtype=torch.float32, block_size=size)
    layout, query, layers = kernel_inputs(step, shape, torch.device("cpu"))
    assert len(layers) == 32
    given = ReferenceKernels().plan(layout, size).attend(query, layers[1], shape.rule)
    first = 0
    blocks: set[int] = set()
    for span, table in zip(step.spans, layout.tables, strict=True):
        own = table[: -(-span.length // size)].tolist()
        assert 0 not in own and blocks.isdisjoint(own), "block 0 is the padding block"
        blocks |= set(own)
        keys, values = layers[1][own].transpose(0, 1).reshape(2, -1, 2, 16)[:, : span.length].transpose(1, 2)
        queries = query[first : first + span.num_new].transpose(0, 1)
        apart = torch.arange(span.num_before, span.length)[:, None] - torch.arange(span.length)
        seen = (apart >= 0) & (apart < 20)
        expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, seen, enable_gqa=True)
        torch.testing.assert_close(
            given[first : first + span.num_new].view(-1, 4, 16), expected.transpose(0, 1), atol=1e-5, rtol=0
        )
        first += span.num_new


def test_the_table_has_both_times_and_their_ratio(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = [KernelFigure("decode 8x64", 12.0, 3.5, "TB/s", 10.0), KernelFigure("chunk 512", 80.0, 400.0, "TFLOP/s")]
    monkeypatch.setattr(attention, "measure_kernels", lambda shape, beside, steps: iter(figures))
    bench_engine.kernels(HeadShape(), STANDARD_STEPS, "torch", as_json=False)
    shown = capsys.readouterr().out
    [first] = [line for line in shown.splitlines() if "decode" in line]
    [second] = [line for line in shown.splitlines() if "chunk" in line]
    assert "12.0" in first and "10.0" in first and "1.20" in first
    assert "80.0" in second and second.count("–") == 2, "the library does not run such steps"
