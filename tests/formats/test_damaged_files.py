"""Whatever happens to a file, opening and loading it ends in weights or in a `QuireError`."""

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.errors import BrokenModelFile, QuireError
from quire.formats.open_checkpoint import open_checkpoint
from tests.formats.tiny import save_folder, tiny_gguf, tiny_model
from tests.tiers import examples
from tests.weights.loading import load

HEADER_BYTES = 3000  # of the tiny files: metadata, names, the first tensors' descriptions


@pytest.fixture(scope="module")
def gguf_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    extra = {"tokenizer__ggml__tokens": ["a", "bc", "ü"], "tokenizer__ggml__scores": [0.0, 1.0, 2.0]}
    return tiny_gguf(tmp_path_factory.mktemp("gguf") / "m.gguf", "llama", **extra).read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_folder(tiny_model("llama"), tmp_path_factory.mktemp("folder"))


def outcome(path: Path) -> QuireError | None:
    try:
        load(open_checkpoint(path), torch.float32)
    except QuireError as error:
        return error
    return None


def damage_gguf(path: Path, content: bytes) -> QuireError | None:
    path.write_bytes(content)
    return outcome(path)


def damage_safetensors(folder: Path, change: Callable[[bytes], bytes]) -> QuireError | None:
    file = folder / "model.safetensors"
    content = file.read_bytes()
    try:
        file.write_bytes(change(content))
        return outcome(folder)
    finally:
        file.write_bytes(content)


def test_a_gguf_cut_anywhere_is_refused_with_its_size(tmp_path: Path, gguf_bytes: bytes) -> None:
    cuts = [*range(0, HEADER_BYTES, 37), *range(HEADER_BYTES, len(gguf_bytes), 9973), len(gguf_bytes) - 32]
    for cut in cuts:
        error = damage_gguf(tmp_path / "m.gguf", gguf_bytes[:cut])
        assert isinstance(error, BrokenModelFile), cut
        assert str(cut) in error.message and "m.gguf" in error.message


def test_a_safetensors_cut_anywhere_is_refused_with_its_size(folder: Path) -> None:
    size = (folder / "model.safetensors").stat().st_size
    for cut in [*range(0, HEADER_BYTES, 37), *range(HEADER_BYTES, size, 9973), size - 1]:
        error = damage_safetensors(folder, lambda content, cut=cut: content[:cut])
        assert isinstance(error, BrokenModelFile), cut
        assert str(cut) in error.message and "model.safetensors" in error.message


@settings(max_examples=examples(60, 300))
@given(place=st.integers(0, HEADER_BYTES - 1), value=st.integers(0, 255), width=st.integers(1, 8))
def test_overwritten_gguf_headers(
    tmp_path_factory: pytest.TempPathFactory, gguf_bytes: bytes, place: int, value: int, width: int
) -> None:
    damaged = gguf_bytes[:place] + bytes([value]) * width + gguf_bytes[place + width :]
    damage_gguf(tmp_path_factory.getbasetemp() / "damaged.gguf", damaged)


@settings(max_examples=examples(60, 300))
@given(place=st.integers(0, HEADER_BYTES - 1), value=st.integers(0, 255), width=st.integers(1, 8))
def test_overwritten_safetensors_headers(folder: Path, place: int, value: int, width: int) -> None:
    damage_safetensors(folder, lambda all_: all_[:place] + bytes([value]) * width + all_[place + width :])


@pytest.mark.parametrize("place", [8, 16])  # the number of tensors, the number of metadata entries
@pytest.mark.parametrize("count", [2**32, 2**60, 2**64 - 1])
def test_an_impossible_count_is_not_followed(tmp_path: Path, gguf_bytes: bytes, place: int, count: int) -> None:
    damaged = gguf_bytes[:place] + struct.pack("<Q", count) + gguf_bytes[place + 8 :]
    error = damage_gguf(tmp_path / "m.gguf", damaged)
    assert isinstance(error, BrokenModelFile) and str(count) in error.message


def test_an_array_longer_than_the_file_is_not_followed(tmp_path: Path, gguf_bytes: bytes) -> None:
    for key in (b"tokenizer.ggml.scores", b"tokenizer.ggml.tokens"):
        place = gguf_bytes.index(key) + len(key) + 8  # past the two type words, at the length
        damaged = gguf_bytes[:place] + struct.pack("<Q", 2**61) + gguf_bytes[place + 8 :]
        assert isinstance(damage_gguf(tmp_path / "m.gguf", damaged), BrokenModelFile)


def test_other_bytes_are_no_gguf(tmp_path: Path, gguf_bytes: bytes) -> None:
    for content in (b"", b"GGU", b"GGML" + gguf_bytes[4:], b"<html>not found</html>"):
        error = damage_gguf(tmp_path / "m.gguf", content)
        assert error is not None and "not a GGUF" in error.message
    big_endian = gguf_bytes[:4] + struct.pack(">I", 3) + gguf_bytes[8:]
    error = damage_gguf(tmp_path / "m.gguf", big_endian)
    assert error is not None and "big-endian" in error.message
