"""Pieces of stored tensors come to their places whole, whoever brings them; what goes wrong on the way is told."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.errors import BrokenModelFile
from quire.formats.checkpoint import StoredTensor
from quire.weights import loader_threads as carrying
from quire.weights import tensor_reader as slices
from quire.weights.dequantize import PLAIN, FloatsOnly
from quire.weights.loader_threads import load_slices
from quire.weights.tensor_reader import slices_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
OFFSET = 3  # in the file: nothing there is aligned


def store(path: Path, values: Tensor) -> StoredTensor:
    [encoding] = [name for name, dtype in PLAIN.items() if dtype == values.dtype]
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    path.write_bytes(b"x" * OFFSET + data + b"behind it")
    return StoredTensor(path.name, tuple(values.shape), encoding, path, OFFSET, len(data))


def values_of(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("stays", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", PLAIN.values())
@pytest.mark.parametrize("shape", [(1,), (37,), (50, 7), (9, 700)])
def test_every_dtype_comes_to_every_other(
    tmp_path: Path, shape: tuple[int, ...], stored: torch.dtype, stays: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slices, "PLAIN_BYTES", 100)
    monkeypatch.setattr(carrying, "_CAST_AT_ONCE", 11)
    values = values_of(shape, stored)
    destination = torch.full((shape[0] + 2, *shape[1:]), 7.0, dtype=stays, device=DEVICE)
    reported: list[int] = []
    tensor = store(tmp_path / "t", values)
    load_slices(slices_of(tensor, destination[1:-1]), FloatsOnly(), DEVICE, reported.append)
    assert torch.equal(destination[1:-1].cpu(), values.to(stays))
    assert (destination[[0, -1]] == 7).all(), "nothing beside it is written"
    assert sum(reported) == tensor.num_bytes
    assert len(reported) == min(shape[0], -(-shape[0] // max(1, 100 // (tensor.num_bytes // shape[0]))))


class Doubling:
    """Packs a value into a byte; knows whose threads ask."""

    def __init__(self) -> None:
        self.threads: set[int] = set()

    def group_size(self, encoding: str) -> int:
        return 1

    def knows(self, encoding: str) -> bool:
        return True

    def dequantize(self, data: np.ndarray, encoding: str) -> Tensor:
        self.threads.add(threading.get_ident())
        return torch.from_numpy(data.astype(np.float32) * 2)


def test_what_is_packed_is_unpacked_by_several_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_VALUES", 40)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    packed = np.arange(4000, dtype=np.uint32).astype(np.uint8).reshape(400, 10)
    path = tmp_path / "t"
    path.write_bytes(packed.tobytes())
    destination = torch.zeros(400, 10, dtype=torch.bfloat16, device=DEVICE)
    dequantizer, reported = Doubling(), set[int]()
    tensor = StoredTensor("t", (400, 10), "DOUBLED", path, 0, packed.nbytes)
    load_slices(
        slices_of(tensor, destination), dequantizer, DEVICE, lambda num_bytes: reported.add(threading.get_ident())
    )
    assert torch.equal(destination.cpu(), torch.from_numpy(packed.astype(np.float32) * 2).to(torch.bfloat16))
    assert reported == {threading.get_ident()}, "whoever asked is told in its own thread"
    assert dequantizer.threads and threading.get_ident() not in dequantizer.threads


def test_in_inference_mode(tmp_path: Path) -> None:
    values = values_of((50, 7), torch.float32)
    tensor = store(tmp_path / "t", values)
    with torch.inference_mode():
        rooms = [torch.zeros(50, 7, dtype=dtype, device=DEVICE) for dtype in (torch.float32, torch.float16)]
        for destination in rooms:
            load_slices(slices_of(tensor, destination), FloatsOnly(), DEVICE, lambda num_bytes: None)
    assert all(torch.equal(destination.cpu(), values.to(destination.dtype)) for destination in rooms)


def test_a_file_that_became_shorter(tmp_path: Path) -> None:
    tensor = store(tmp_path / "t", values_of((50, 7), torch.float32))
    with (tmp_path / "t").open("rb+") as file:
        file.truncate(OFFSET + 1000)
    with pytest.raises(BrokenModelFile, match=r"changed while it was read: tensor t lacks 400 bytes of 1400"):
        load_slices(slices_of(tensor, torch.zeros(50, 7, device=DEVICE)), FloatsOnly(), DEVICE, lambda num_bytes: None)


def test_a_file_that_went_away(tmp_path: Path) -> None:
    tensor = store(tmp_path / "t", values_of((50, 7), torch.float32))
    (tmp_path / "t").unlink()
    with pytest.raises(BrokenModelFile, match=r"t cannot be read: .*No such file"):
        load_slices(slices_of(tensor, torch.zeros(50, 7, device=DEVICE)), FloatsOnly(), DEVICE, lambda num_bytes: None)


class Slow(Doubling):
    """All of it would take minutes."""

    num_asked = 0

    def dequantize(self, data: np.ndarray, encoding: str) -> Tensor:
        time.sleep(0.01)
        self.num_asked += 1
        return super().dequantize(data, encoding)


def test_an_interrupt_waits_for_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE_VALUES", 1)
    path = tmp_path / "t"
    path.write_bytes(bytes(50_000))
    tensor = StoredTensor("t", (50_000,), "SLOW", path, 0, 50_000)
    dequantizer = Slow()

    def enough(num_bytes: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        load_slices(slices_of(tensor, torch.zeros(50_000, device=DEVICE)), dequantizer, DEVICE, enough)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("quire-weights")]
    assert dequantizer.num_asked < 50_000, "the rest was left"
