"""Which products of few rows go to the kernel with a ring, as long as it can be compiled. Knows its bounds alone."""

import torch
from torch import Tensor

from quire.kernels.gpu.gemm.hopper_split import MOST_ROWS, OUTS, GemmSplit, cut
from quire.kernels.gpu.hopper_support import hopper_processors, is_elsewhere, tell_broken
from quire.kernels.interface import PartialSums

try:
    from quire.kernels.gpu.gemm.hopper_ring import ring_product, tiles_of
except (ImportError, AttributeError) as error:
    _missing = f"{type(error).__name__}: {error}"
else:
    _missing = ""

_INSTEAD = "products of few rows by the kernels for every card, or torch"
_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes: of tensors, and of their rows, as the copy engine wants them
_MOST_NUMBERS = 2**31
_MOST_TILES = 8192


class HopperGemm:
    """The kernel on one card, with the room that programs share sums in: for one stream at a time. The room is there
    before anything is recorded and never moves; a launch leaves its counters as it found them, at zero."""

    __slots__ = ("_arrivals", "_described", "_is_broken", "_num_processors", "_shares")

    def __init__(self, num_processors: int, device: torch.device | str) -> None:
        self._num_processors = num_processors
        self._is_broken = False
        self._described: dict[int, object] = {}  # by a weight's id; they hold the weights
        self._shares = torch.empty(num_processors * OUTS * MOST_ROWS, device=device)
        self._arrivals = torch.zeros(_MOST_TILES, dtype=torch.int32, device=device)

    @staticmethod
    def find() -> "HopperGemm | None":
        num_processors = hopper_processors(_missing, _INSTEAD)
        return None if num_processors is None else HopperGemm(num_processors, "cuda")

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """[rows, out], as x. None: it is another's, and nothing was launched."""
        how = self._cut(x, weight, bias, may_part=False)
        return None if how is None else self._multiply(x, weight, bias, how)

    def parts(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | PartialSums | None:
        """The same, and in parts where there are more processors than tiles."""
        how = self._cut(x, weight, bias, may_part=True)
        output = None if how is None else self._multiply(x, weight, bias, how)
        return PartialSums(output, x.dtype) if output is not None and output.dim() == 3 else output

    def _cut(self, x: Tensor, weight: Tensor, bias: Tensor | None, may_part: bool) -> GemmSplit | None:
        if len(x) > MOST_ROWS or self._is_broken or weight.dtype not in _DTYPES or x.dtype is not weight.dtype:
            return None
        out_width, in_width = weight.shape
        if (
            in_width * weight.element_size() % _ALIGNMENT
            or weight.numel() >= _MOST_NUMBERS
            or out_width > OUTS * _MOST_TILES
        ):
            return None
        is_regular = x.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous())
        if not is_regular or x.data_ptr() % _ALIGNMENT or weight.data_ptr() % _ALIGNMENT:
            return None
        return cut(len(x), in_width, out_width, self._num_processors, may_part)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, how: GemmSplit) -> Tensor | None:
        try:
            known = self._described.get(id(weight))
            if known is None:  # a weight is multiplied step after step, and never moves
                known = self._described[id(weight)] = tiles_of(weight)
            return ring_product(x, known, bias, self._shares, self._arrivals, how)
        except Exception as error:  # whatever it is that this Triton does not know
            if is_elsewhere(error):
                raise
            self._is_broken = True
            tell_broken(error, _INSTEAD)
            return None
