"""How the native kernels are found, compiled and chosen, each in a process of its own; and what runs without them."""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.kernels.cpu.native_build import (
    CHOICE_VARIABLE,
    SOURCES,
    CompilationFailed,
    compile_variant,
    compiler,
    find_library,
    known_variants,
    source_hash,
    usable_variants,
)
from quire.kernels.cpu.native_library import load_native
from tests import children
from tests.cli.commands import Shell
from tests.tiers import long_only

needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler here")
# The smallest shapes that reach every loop: products of each format, attention over two blocks, a norm and a gate. One
# process imports torch, and a child of it checks each variant.
CHECKS = f"""
import json, os, sys
import torch
from quire.kernels.cpu.native_library import load_native
from quire.kernels.interface import AttentionRule
from quire.kernels.reference import ReferenceKernels
from quire.kernels.select import select_kernels
from tests.kernels.cpu_kernels import no_rotation
from tests.kernels.layouts import Pages, Part
from tests.kernels.stored_rows import ENCODINGS, decoded, drawn_rows, stored, weight_of

def close(fast, truth, tolerance):
    torch.testing.assert_close(fast, truth, atol=tolerance * truth.abs().max().item(), rtol=0)

def check():
    choice, truth = select_kernels("cpu"), ReferenceKernels()
    kernels, generator = choice.kernels, torch.Generator().manual_seed(0)
    x = torch.randn(9, 256, generator=generator)
    if choice.stored_encodings:
        for encoding in ENCODINGS:
            rows = drawn_rows(encoding, 23, 256)
            packed = kernels.pack(weight_of(256, stored(encoding, rows)))
            close(kernels.linear(x, packed, None), x @ decoded(encoding, rows).T, 0.02)
    weight = torch.randn(23, 256, generator=generator)
    close(kernels.linear(x, kernels.pack(weight), None), x @ weight.T, 1e-5)
    close(kernels.rms_norm(x, weight[0], 1e-5), truth.rms_norm(x, weight[0], 1e-5), 1e-5)
    for activation in ("silu", "gelu_tanh"):
        close(kernels.act_and_mul(x, activation), truth.act_and_mul(x, activation), 1e-5)
    pages = Pages.shuffled([20, 7], 16, seed=0)
    layout = pages.layout({{0: Part(0, 20), 1: Part(0, 7)}})
    qkv = torch.randn(27, 8, 24, generator=generator)
    for dtype in (torch.float32, torch.float16, torch.int8) if choice.stored_encodings else (torch.float32,):
        outputs, width = [], 28 if dtype is torch.int8 else 24
        for each in (kernels, truth):
            store, mine = torch.zeros(pages.num_blocks, 2, 16, 2, width, dtype=dtype), qkv.clone()
            step = each.plan(layout, 16)
            step.rope_and_write_kv(mine, None, no_rotation(27), store)
            outputs.append(step.attend(mine[:, :4], store, AttentionRule(0.3, window=9, softcap=4.0)))
        close(*outputs, 1e-5)
    library = load_native()
    return [library.name if library else None, choice.reason]

for name in sys.argv[1:]:
    if (child := os.fork()) == 0:
        os.environ[{CHOICE_VARIABLE!r}] = name
        load_native.cache_clear()
        print(json.dumps([name, *check()]), flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""
NO_VARIANT = "none"
NAMES = [variant.name for variant in known_variants()]
BEST, BETWEEN, LEAST = NAMES[:1], NAMES[1:-1], NAMES[1:][-1:]


@pytest.fixture(scope="module")
def chosen() -> Callable[[str], tuple[str | None, str]]:
    """The variant that is loaded and the reason, where the environment names one, after its results were checked."""
    names = [variant.name for variant in usable_variants()] if compiler() else []
    command = [sys.executable, "-c", CHECKS, *names, NO_VARIANT]
    result = children.run(command, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("[")]
    found = {name: (library, reason) for name, library, reason in lines}

    def of(name: str) -> tuple[str | None, str]:
        assert name in found, result.stderr[-3000:]
        return found[name]

    return of


@needs_compiler
@pytest.mark.parametrize("name", [variant.name for variant in known_variants()])
def test_every_variant_that_this_cpu_can_run_is_right(
    name: str, chosen: Callable[[str], tuple[str | None, str]]
) -> None:
    if name not in [variant.name for variant in usable_variants()]:
        pytest.skip("this CPU lacks its instructions")
    found, reason = chosen(name)
    assert found == name and f"native kernels for {name}" in reason


@needs_compiler
@pytest.mark.parametrize("name", [*BEST, *LEAST, *long_only(BETWEEN)])
def test_variants_for_other_cpus_are_valid_sources(name: str) -> None:
    """Of those that this CPU can run, the results are checked above."""
    variant, program = next(each for each in known_variants() if each.name == name), compiler()
    if program is None or variant in usable_variants():
        pytest.skip("it is run")
    command = [program, "-std=c++17", "-fsyntax-only", "-w", *variant.flags, str(SOURCES / "api.cpp")]
    done = children.run(command, capture_output=True, text=True, check=False)
    if "unrecognized" in done.stderr or "unknown argument" in done.stderr:
        pytest.skip("this compiler lacks its instructions")
    assert done.returncode == 0, done.stderr[:1000]


def test_without_native_kernels_torch_computes_and_the_reason_is_given(
    chosen: Callable[[str], tuple[str | None, str]],
) -> None:
    found, reason = chosen(NO_VARIANT)
    assert found is None and f"switched off by {CHOICE_VARIABLE}" in reason


def test_without_a_compiler_torch_computes_and_the_reason_is_given(tmp_path: Path, absent: Path) -> None:
    environment = {"PATH": str(tmp_path), "CXX": "", "XDG_CACHE_HOME": str(tmp_path)}
    result = loaded(environment, absent)
    assert result == [None, f"{usable_variants()[0].name}: no C++ compiler is installed (g++ or clang++)"]


def test_a_cache_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path, absent: Path) -> None:
    occupied = tmp_path / "file"
    occupied.write_text("")
    name, reason = loaded({"XDG_CACHE_HOME": str(occupied)}, absent)
    assert name is None and reason is not None
    assert str(occupied) in reason and "\n" not in reason


@pytest.fixture
def absent(tmp_path: Path) -> Path:
    """The sources in a folder without compiled libraries."""
    folder = tmp_path / "native"
    folder.mkdir()
    for source in (*SOURCES.glob("*.h"), *SOURCES.glob("*.cpp")):
        (folder / source.name).write_bytes(source.read_bytes())
    return folder


def loaded(environment: dict[str, str], sources: Path) -> list[str | None]:
    """The variant and why there is none, with sources of which nothing is compiled yet."""
    code = f"""
import json, pathlib
from quire.kernels.cpu import native_build
native_build.SOURCES = pathlib.Path({str(sources)!r})
from quire.kernels.cpu.native_library import load_native, why_not_native
library = load_native()
print(json.dumps([library.name if library else None, None if library else why_not_native()]))
"""
    command = [sys.executable, "-c", code]
    result = children.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    return list(json.loads(result.stdout))


def test_an_unknown_variant_is_an_error_that_lists_the_names(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(CHOICE_VARIABLE, "abacus")
    load_native.cache_clear()  # what is refused is not cached
    result = Shell(monkeypatch, capsys)("doctor")
    assert result.status != 0
    assert "abacus" in result.err
    assert all(variant.name in result.err for variant in known_variants())


def test_a_library_of_other_sources_is_not_found(tmp_path: Path, absent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variant = known_variants()[-1]
    monkeypatch.setattr("quire.kernels.cpu.native_build.SOURCES", absent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    before = source_hash()
    (absent / variant.file_name).write_bytes(b"compiled")
    assert find_library(variant) == absent / variant.file_name
    with (absent / "gemm.h").open("a") as source:
        source.write("// another\n")
    assert source_hash() != before
    assert find_library(variant) is None


@needs_compiler
def test_a_source_that_does_not_compile_is_one_line_and_leaves_nothing(
    tmp_path: Path, absent: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.kernels.cpu.native_build.SOURCES", absent)
    (absent / "api.cpp").write_text("#error not today\n")
    with pytest.raises(CompilationFailed, match="not today") as refused:
        compile_variant(known_variants()[-1], tmp_path / "made")
    assert "\n" not in str(refused.value)
    assert list((tmp_path / "made").iterdir()) == []


@needs_compiler
def test_a_compiler_that_lacks_the_best_instructions_compiles_the_next_variant(tmp_path: Path, absent: Path) -> None:
    """Here it refuses the flags of the best one, as an older compiler does."""
    variants = usable_variants()
    if len(variants) < 2:
        pytest.skip("this CPU can run one variant")
    (absent / "api.cpp").write_text("")  # compiles at once
    old = tmp_path / "old-compiler"
    refused = next(flag for flag in variants[0].flags if flag not in variants[1].flags)
    old.write_text(f'#!/bin/sh\ncase "$*" in *{refused}*) exit 1;; esac\nexec {compiler()} "$@"\n')
    old.chmod(0o755)
    code_environment = {"CXX": str(old), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    made = compiled_names(code_environment, absent)
    assert made == [variants[1].file_name.rsplit("_", 1)[0]]


def compiled_names(environment: dict[str, str], sources: Path) -> list[str]:
    """What a first start leaves in the cache folder; the empty library cannot be used."""
    code = f"""
import pathlib
from quire.kernels.cpu import native_build, native_library
native_build.SOURCES = pathlib.Path({str(sources)!r})
native_library.NativeLibrary = lambda name, path: name
print(native_library.load_native())
"""
    command = [sys.executable, "-c", code]
    children.run(command, capture_output=True, text=True, check=True, env={**os.environ, **environment})
    folder = Path(environment["XDG_CACHE_HOME"]) / "quire" / "kernels"
    return [path.name.rsplit("_", 1)[0] for path in folder.iterdir()]
