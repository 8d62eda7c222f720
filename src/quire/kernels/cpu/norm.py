"""RMSNorm in one pass over each row, compiled by numba. Does not depend on torch.

On one thread: a decode step has so few rows that waking a second thread costs more than it saves.
"""

import numba
import numpy as np
from numpy import float32, uintp

from quire.core.ids import FloatArray
from quire.kernels.cpu.bits import OPTIONS, Words, narrow, widen


def _norm_row(wide: FloatArray, weight: FloatArray, epsilon: np.float32, output: Words) -> None:
    """wide, weight, output: [width]."""
    total = float32(0)
    for i in range(uintp(len(wide))):
        total += wide[i] * wide[i]
    inverse = float32(1) / np.sqrt(total / float32(len(wide)) + epsilon)
    for i in range(uintp(len(wide))):
        output[i] = narrow(wide[i] * inverse * weight[i], output[i])


def _norm(x: Words, weight: FloatArray, epsilon: np.float32, output: Words) -> None:
    """x, output: [rows, width]; weight: [width]."""
    wide = np.empty(x.shape[1], float32)
    for row in range(x.shape[0]):
        for i in range(uintp(x.shape[1])):
            wide[i] = widen(x[row, i])
        _norm_row(wide, weight, epsilon, output[row])


def _add_norm(x: Words, residual: FloatArray, weight: FloatArray, epsilon: np.float32, output: Words) -> None:
    """residual += x, then its norm. x, residual, output: [rows, width]; weight: [width]."""
    for row in range(x.shape[0]):
        for i in range(uintp(x.shape[1])):
            residual[row, i] += widen(x[row, i])
        _norm_row(residual[row], weight, epsilon, output[row])


_norm_row = numba.njit(**OPTIONS)(_norm_row)
norm = numba.njit(**OPTIONS)(_norm)
add_norm = numba.njit(**OPTIONS)(_add_norm)
