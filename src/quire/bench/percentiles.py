"""Where most of some times lie, and the worst of them."""

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np


class Percentiles(NamedTuple):
    """Of some seconds, in milliseconds; by nearest rank, so that each is one that was measured."""

    p50: float
    p90: float
    p99: float
    max: float


def percentiles_ms(seconds: Many[float]) -> Percentiles | None:
    if not seconds:
        return None
    found = np.quantile(np.asarray(seconds) * 1000, (0.5, 0.9, 0.99, 1.0), method="inverted_cdf")
    return Percentiles(*(round(float(value), 4) for value in found))
