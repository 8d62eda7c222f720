"""The launch cache: which launches go straight to a compiled kernel."""

from types import SimpleNamespace

import pytest
import torch
from triton.compiler import CompiledKernel

from quire.kernels.gpu import launch as launch_module
from quire.kernels.gpu.launch import launch


class Compiled(CompiledKernel):
    """Notes what its launcher is called with: the grid and the arguments. The code is "function", with no metadata."""

    function, packed_metadata = "function", ()

    def __init__(self) -> None:
        self.module = None  # never loaded
        self.launched: list[tuple[object, ...]] = []

    @property
    def run(self):
        def start(x, y, z, stream, function, metadata, launch_metadata, enter_hook, exit_hook, *args):
            assert (stream, function, metadata) == ("stream", "function", ())
            assert launch_metadata is enter_hook is exit_hook is None
            self.launched.append(((x, y, z), *args))

        return start


class Kernel:
    """Compiles anew whenever it is asked, as Triton would for arguments of a new kind."""

    arg_names = ("x", "count", "rate", "WIDTH", "ROWS")

    def __init__(self) -> None:
        self.made: list[Compiled] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*args: object, **constants: object) -> Compiled:
            self.made.append(Compiled())
            return self.made[-1]

        return run


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(launch_module, "_cache", {})
    active = SimpleNamespace(get_current_stream=lambda device: "stream")
    monkeypatch.setattr(launch_module, "driver", SimpleNamespace(active=active))
    return Kernel()


def start(kernel, x, count=3, rate=0.5, width=16, rows=4, grid=(7,)):
    launch(kernel, grid, x, count, rate, num_warps=4, ROWS=rows, WIDTH=width)


def test_a_cached_launch_skips_triton_and_passes_constants_in_order(kernel):
    first, second = torch.zeros(8), torch.zeros(8)
    start(kernel, first)
    start(kernel, second, grid=(9, 2))
    assert len(kernel.made) == 1
    [(grid, x, *others)] = kernel.made[0].launched
    assert grid == (9, 2, 1) and x is second and others == [3, 0.5, 16, 4]


@pytest.mark.parametrize(
    "changed",
    [
        {"x": torch.zeros(8, dtype=torch.int32)},
        {"x": torch.zeros(9)[1:]},  # begins between two multiples of 16 bytes
        {"count": 1},
        {"count": 16},
        {"rate": 0.25},
        {"width": 32},
        {"rows": 8},
    ],
)
def test_a_launch_with_a_new_signature_goes_through_triton(kernel, changed):
    usual = {"x": torch.zeros(8)}
    start(kernel, **usual)
    start(kernel, **{**usual, **changed})
    assert len(kernel.made) == 2 and not any(made.launched for made in kernel.made)
    start(kernel, **{**usual, **changed})
    assert [len(made.launched) for made in kernel.made] == [0, 1]


def test_the_cache_distinguishes_kernels(kernel):
    other = Kernel()
    for each in (kernel, other):
        start(each, torch.zeros(8))
    assert len(kernel.made) == len(other.made) == 1


def test_each_device_has_compiled_kernels_of_its_own(kernel, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for device in (0, 1, 0, 1, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        start(kernel, torch.zeros(8))
    assert [len(made.launched) for made in kernel.made] == [1, 2]


def test_the_launch_cache_is_bounded(kernel, monkeypatch):
    monkeypatch.setattr(launch_module, "_MAX_CACHED", 3)
    for count in (2, 3, 4, 5, 6):
        start(kernel, torch.zeros(8), count)
    assert len(launch_module._cache) <= 3
    start(kernel, torch.zeros(8), 6)
    assert kernel.made[-1].launched


class Refusing(Kernel):
    """Says something when it is launched, as Triton does when the driver refuses."""

    def __init__(self, said: str) -> None:
        super().__init__()
        self.said = said

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*args: object, **constants: object) -> Compiled:
            raise RuntimeError(self.said)

        return run


def test_a_full_gpu_raises_out_of_memory_and_other_errors_pass_unchanged():
    with pytest.raises(torch.OutOfMemoryError, match="CUDA"):
        start(Refusing("Triton Error [CUDA]: out of memory"), torch.zeros(8))
    with pytest.raises(RuntimeError, match="no kernel image") as caught:
        start(Refusing("Triton Error [CUDA]: no kernel image"), torch.zeros(8))
    assert not isinstance(caught.value, torch.OutOfMemoryError)
