"""Which GEMMs of few rows the Hopper kernel computes, as long as it compiles. Depends on its limits only."""

import torch
from torch import Tensor

from quire.kernels.gpu.gemm.hopper_split import MAX_ROWS, OUTS, GemmSplit, split_gemm
from quire.kernels.gpu.hopper_support import hopper_num_sms, is_unrelated, log_broken
from quire.kernels.interface import PartialSums

try:
    from quire.kernels.gpu.gemm.hopper_ring import ring_gemm, weight_descriptor
except (ImportError, AttributeError) as error:
    _missing = f"{type(error).__name__}: {error}"
else:
    _missing = ""

_INSTEAD = "small-batch GEMMs by the portable kernels or torch"
_DTYPES = (torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes: of tensors and their rows, as TMA needs
_MAX_NUMBERS = 2**31
_MAX_TILES = 8192


class HopperGemm:
    """The Hopper GEMM on one GPU, with scratch for partial sums: for one stream at a time. The scratch is allocated
    before any CUDA graph is captured and never moves; a launch leaves its counters at zero."""

    __slots__ = ("_arrivals", "_descriptors", "_is_broken", "_num_sms", "_partials")

    def __init__(self, num_sms: int, device: torch.device | str) -> None:
        self._num_sms = num_sms
        self._is_broken = False
        self._descriptors: dict[int, object] = {}  # TMA descriptors by the weight's id; they keep the weights alive
        self._partials = torch.empty(num_sms * OUTS * MAX_ROWS, device=device)
        self._arrivals = torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)

    @staticmethod
    def find() -> "HopperGemm | None":
        num_sms = hopper_num_sms(_missing, _INSTEAD)
        return None if num_sms is None else HopperGemm(num_sms, "cuda")

    def matmul(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """[rows, out], as x. None: not supported, and nothing was launched."""
        how = self._split(x, weight, bias, may_split=False)
        return None if how is None else self._multiply(x, weight, bias, how)

    def matmul_unreduced(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | PartialSums | None:
        """The same, or split-K partial sums where there are more SMs than tiles."""
        how = self._split(x, weight, bias, may_split=True)
        output = None if how is None else self._multiply(x, weight, bias, how)
        return PartialSums(output, x.dtype) if output is not None and output.dim() == 3 else output

    def _split(self, x: Tensor, weight: Tensor, bias: Tensor | None, may_split: bool) -> GemmSplit | None:
        if x.shape[0] > MAX_ROWS or self._is_broken or weight.dtype not in _DTYPES or x.dtype is not weight.dtype:
            return None
        out_width, in_width = weight.shape
        if (
            in_width * weight.element_size() % _ALIGNMENT
            or weight.numel() >= _MAX_NUMBERS
            or out_width > OUTS * _MAX_TILES
        ):
            return None
        is_regular = x.is_contiguous() and weight.is_contiguous() and (bias is None or bias.is_contiguous())
        if not is_regular or x.data_ptr() % _ALIGNMENT or weight.data_ptr() % _ALIGNMENT:
            return None
        return split_gemm(x.shape[0], in_width, out_width, self._num_sms, may_split)

    def _multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None, how: GemmSplit) -> Tensor | None:
        try:
            descriptor = self._descriptors.get(id(weight))
            if descriptor is None:  # a weight is used every step and never moves
                descriptor = self._descriptors[id(weight)] = weight_descriptor(weight)
            return ring_gemm(x, descriptor, bias, self._partials, self._arrivals, how)
        except Exception as error:  # any incompatibility of this Triton
            if is_unrelated(error):
                raise
            self._is_broken = True
            log_broken(error, _INSTEAD)
            return None
