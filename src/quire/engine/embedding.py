"""A prompt as one vector: the mean of its hidden states, at length one. Pure arithmetic."""

import numpy as np

from quire.core.ids import FloatArray
from quire.core.sampling import SamplingParams

EMBEDDING = SamplingParams(temperature=0.0, max_tokens=1)  # nothing is sampled: how an embedding is ordered


def unit(total: FloatArray) -> FloatArray:
    """A sum at length one: the mean's direction is the sum's. What has no direction stays as it is."""
    length = np.linalg.norm(total.astype(np.float64))
    scaled: FloatArray = total if length == 0.0 else (total / length).astype(np.float32)
    return scaled
