"""What the prefix tree has after a text: what was inserted, exact to the token, and only of its partition."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire.core.ids import IntArray, RequestId, Row
from quire.core.request import BlockOwner
from quire.kv.manager import KVManager, count_blocks

OWNER = BlockOwner(RequestId(0), "", 0)


def ids(tokens: list[int]) -> IntArray:
    return np.array(tokens, dtype=np.int32)


def kept(texts: list[list[int]], block_size: int) -> KVManager:
    """A cache that has these texts, the last one used last."""
    kv = KVManager(200, block_size, 1)
    for text in texts:
        kv.open(Row(0), OWNER, None, count_blocks(len(text), block_size))
        kv.grow_to(Row(0), len(text), OWNER.request)
        kv.close(Row(0), OWNER, ids(text))
    return kv


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=6), st.integers(1, 4), st.data()
)
def test_a_continuation_is_one_of_those_inserted_and_none_is_missed(texts, block_size, data) -> None:
    kv = kept(texts, block_size)
    asked = data.draw(st.sampled_from(texts)) if data.draw(st.booleans()) else data.draw(st.lists(st.integers(0, 2)))
    asked = asked[: data.draw(st.integers(0, len(asked)))]
    found = kv.continuation(OWNER, ids(asked), 100).tolist()
    longer = [text[len(asked) :] for text in texts if text[: len(asked)] == asked and len(text) > len(asked)]
    assert any(rest[: len(found)] == found for rest in longer) if found else not longer or not asked
    assert kv.continuation(OWNER, ids(asked), 2).tolist() == found[:2]
    assert kv.continuation(OWNER._replace(partition="other"), ids(asked), 100).tolist() == []


def test_of_several_the_last_used_is_taken() -> None:
    kv = kept([[1, 2, 3, 4, 5], [1, 2, 3, 8, 9], [7]], 2)
    assert kv.continuation(OWNER, ids([1, 2, 3]), 9).tolist() == [8, 9]
    assert kv.continuation(OWNER, ids([1, 2]), 9).tolist() == [3, 8, 9]
    assert kv.continuation(OWNER, ids([1, 2, 3, 4]), 9).tolist() == [5]


def test_without_prefix_caching_there_is_none() -> None:
    assert len(KVManager(4, 4, 1, prefix=False).continuation(OWNER, ids([1, 2]), 9)) == 0
