"""Many tokens on a matrix unit: in bfloat16, against the same products in float64 and the other kernels.

Where the CPU has none, the long tier compiles the kernels for tiles in plain C++ (`emulated_matrix_unit.h`).
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.kernels import select
from quire.kernels.attention_backends import AttentionNeeds
from quire.kernels.cpu.native_build import (
    Variant,
    cache_folder,
    compile_variant,
    compiler,
    cpu_flags,
    find_library,
    known_variants,
)
from quire.kernels.cpu.native_kernels import NativeKernels
from quire.kernels.cpu.native_library import NativeLibrary
from quire.kernels.interface import AttentionRule
from quire.kernels.reference import ReferenceKernels
from quire.models.decoder import Decoder
from tests.kernels.cpu_kernels import as_stored, native_kernels
from tests.kernels.layouts import Pages, Part
from tests.kernels.stored_rows import ENCODINGS, drawn_rows, stored, weight_of
from tests.kernels.test_native_attention import filled
from tests.kernels.test_native_linear import WIDTH, drawn, error_bound, unpacked
from tests.models.running import run
from tests.models.test_native_decoder import divergence, prompts, stored_as, twin
from tests.tiers import is_long, long_only

FEWEST_TOKENS = 32  # of a step, as `matrix_gemm.h` has it
ROUNDING = 2**-8 + 2**-15  # of two factors in bfloat16


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    variants = {variant.name: variant for variant in known_variants() if variant.features <= cpu_flags()}
    if "avx512" not in variants or compiler() is None:
        pytest.skip("needs a CPU with AVX-512, and a C++ compiler")
    if unit := variants.get("amx_bf16"):
        return NativeLibrary(unit.name, find_library(unit) or compile_variant(unit, cache_folder()))
    if not is_long():
        pytest.skip("this CPU has no AMX, and compiling an emulation takes 30 s: pytest --long")
    header = Path(__file__).with_name("emulated_matrix_unit.h")
    flags = (*variants["avx512"].flags, "-include", str(header))
    emulated = Variant("emulated", flags, variants["avx512"].features)
    return NativeLibrary("emulated", compile_variant(emulated, tmp_path_factory.mktemp("emulated")))


def kernels(library: NativeLibrary, num_threads: int = 2) -> NativeKernels:
    made = NativeKernels(library, num_threads, matrix_unit=True)
    assert made.uses_matrix_unit
    made.set_threads(num_threads)
    return made


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_products_are_those_of_bfloat16_numbers(library: NativeLibrary, encoding: str) -> None:
    matrix = kernels(library)
    for num_rows, num_tokens in ((16, 32), (37, 49), (80, 300), (5, 33)):
        packed = matrix.pack(weight_of(WIDTH, stored(encoding, drawn_rows(encoding, num_rows, WIDTH))))
        x, weight = drawn(num_tokens, WIDTH), unpacked(matrix, packed)
        bound = ROUNDING * (x.double().abs() @ weight.double().abs().T)
        errors = (matrix.linear(x, packed, None).double() - x.double() @ weight.double().T).abs()
        assert (errors <= bound).all(), (errors / bound).max()
        rounded = (errors > error_bound(x, weight, encoding not in ("F32", "F16", "BF16"))).any()
        assert rounded == (encoding != "F32"), "float32 weights are not rounded, others are"


def test_few_tokens_keep_their_bits(library: NativeLibrary) -> None:
    packed = weight_of(WIDTH, stored("Q4_1", drawn_rows("Q4_1", 37, WIDTH)))
    x, matrix, vector = drawn(FEWEST_TOKENS - 1, WIDTH), kernels(library), NativeKernels(library, 1)
    assert torch.equal(matrix.linear(x, matrix.pack(packed), None), vector.linear(x, vector.pack(packed), None))


@pytest.mark.parametrize("encoding", ["Q4_1", "BF16"])
def test_a_token_has_the_same_bits_beside_any_others(library: NativeLibrary, encoding: str) -> None:
    matrix, alone = kernels(library), kernels(library, 1)
    weight = weight_of(WIDTH, stored(encoding, drawn_rows(encoding, 70, WIDTH)))
    x = drawn(290, WIDTH)
    whole = matrix.linear(x, matrix.pack(weight), None)
    for first, last in ((0, 32), (17, 66), (250, 290)):
        assert torch.equal(alone.linear(x[first:last], alone.pack(weight), None), whole[first:last])


def test_a_hostile_row_leaves_the_others_alone(library: NativeLibrary) -> None:
    matrix = kernels(library)
    packed = matrix.pack(weight_of(WIDTH, stored("Q4_1", drawn_rows("Q4_1", 37, WIDTH))))
    x = drawn(40, WIDTH)
    clean = matrix.linear(x, packed, None)
    for row, value in ((3, float("nan")), (20, float("inf")), (33, -float("inf"))):
        x[row, 100] = value
    found = matrix.linear(x, packed, None)
    hostile = torch.zeros(40, dtype=torch.bool)
    hostile[[3, 20, 33]] = True
    assert torch.equal(found[~hostile], clean[~hostile])
    assert not found[hostile].isfinite().any(-1).any()


@pytest.mark.parametrize(
    ("dtype", "window", "softcap"),
    [
        (torch.float32, 0, 0.0),
        (torch.float16, 70, 0.0),
        (torch.int8, 0, 4.0),
        *long_only(
            [
                (torch.float16, 0, 0.0),
                (torch.int8, 0, 0.0),
                (torch.float32, 70, 0.0),
                (torch.int8, 70, 0.0),
                (torch.float16, 0, 4.0),
                (torch.float32, 0, 4.0),
            ]
        ),
    ],
)
def test_attention_agrees_with_the_reference(
    library: NativeLibrary, dtype: torch.dtype, window: int, softcap: float
) -> None:
    """Chunks of many rows, partly filled tiles, splits of keys; memory of other sequences is NaN."""
    matrix = kernels(library)
    for dim, group, parts in (
        (64, 3, [Part(0, 100), Part(530, 21), Part(70, 1)]),
        (32, 1, [Part(3, 17), Part(0, 64)]),
        (128, 8, [Part(600, 5)]),
        (80, 2, [Part(10, 40)]),  # not a multiple of 32: as without the unit
    ):
        held = [part.num_before + part.num_new for part in parts]
        pages = Pages.shuffled(held, 16, 1)
        store = filled(pages, held, 2, dim, dtype, 2)
        tokens = sum(part.num_new for part in parts)
        query = torch.randn(tokens, 2 * group, dim, generator=torch.Generator().manual_seed(3))
        layout, rule = pages.layout(dict(enumerate(parts))), AttentionRule(dim**-0.5, window, softcap)
        truth = ReferenceKernels().plan(layout, 16).attend(query, store, rule)
        found = matrix.plan(layout, 16).attend(query, as_stored(matrix, store), rule)
        torch.testing.assert_close(found, truth, atol=0.02, rtol=0)


@pytest.mark.parametrize(("family", "encoding"), [("llama3", "Q4_0"), ("gemma2", "BF16"), ("qwen2", "Q5_1")])
def test_a_decoder_loses_little(library: NativeLibrary, family: str, encoding: str) -> None:
    model, lengths = twin(family), [60, 33, 1, 64]
    weights = stored_as(model.weights, encoding)

    def logits(with_kernels: NativeKernels) -> list[Tensor]:
        return run(Decoder(model.spec, weights, with_kernels, 64), prompts(lengths), [dict(enumerate(lengths))])

    lost = [
        divergence(exact, found)
        for exact, found in zip(logits(native_kernels()), logits(kernels(library)), strict=True)
    ]
    assert 0 < max(lost) < 2e-3


@pytest.mark.parametrize(
    ("dtype", "batch_invariant", "used"),
    [(torch.bfloat16, False, True), (torch.bfloat16, True, False), (torch.float32, False, False)],
)
def test_it_is_for_models_of_16_bits_that_may_depend_on_the_batch(
    library: NativeLibrary, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, batch_invariant: bool, used: bool
) -> None:
    monkeypatch.setattr(select, "load_native", lambda: library)
    needs = AttentionNeeds(4, 2, 64, dtype, 16, (AttentionRule(0.125),))
    chosen = select.select_kernels("cpu", needs, threads=1, batch_invariant=batch_invariant).kernels
    assert isinstance(chosen, NativeKernels)
    assert chosen.uses_matrix_unit == used
