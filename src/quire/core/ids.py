"""Types of the integer ids that all packages share, and of arrays."""

from typing import NewType

import numpy as np
from numpy.typing import NDArray

RequestId = NewType("RequestId", int)
SequenceId = NewType("SequenceId", int)
Row = NewType("Row", int)
BlockId = NewType("BlockId", int)

IntArray = NDArray[np.int32]
IndexArray = NDArray[np.intp]  # numpy's own index type: with narrower integers an indexed read takes five times as long
FloatArray = NDArray[np.float32]

# Block 0 of every pool: rows that ended on the device and padding write here; it is never read.
NULL_BLOCK = BlockId(0)
