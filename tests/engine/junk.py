"""Arbitrary values that a client may send in any field."""

import numpy as np
from hypothesis import strategies as st

junk = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.binary(max_size=4)
    | st.sampled_from([10**400, -(10**400), float("nan"), object, range(3), {1, 2}, frozenset(), np.arange(2)]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
