"""Names for the integers that travel through the house, and the array types."""

from typing import NewType

import numpy as np
from numpy.typing import NDArray

RequestId = NewType("RequestId", int)
SequenceId = NewType("SequenceId", int)
Row = NewType("Row", int)
BlockId = NewType("BlockId", int)

IntArray = NDArray[np.int32]
IndexArray = NDArray[np.intp]  # what numpy looks up with: narrower integers cost it five times as much in each look-up
FloatArray = NDArray[np.float32]

LONGEST_TOKEN = 128  # characters: a run of spaces in the vocabularies of GPT-4 and Llama 3

# Block 0 of every pool: rows that ended on the device write here, and nobody reads it.
NULL_BLOCK = BlockId(0)
