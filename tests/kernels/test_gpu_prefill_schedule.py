"""The list of tiles that a step's chunks make, against plain Python."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.kernels.gpu.attention.prefill_schedule import work_list
from tests.tiers import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

parts = st.tuples(st.integers(0, 50), st.sampled_from([0, 0, 1, 3, 16, 17, 40, 130]))
many = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2)), min_size=66, max_size=68)  # than are searched at once


def weight_descriptor(starts: list[int], lengths: list[int], tile_rows: int, group: int) -> list[tuple[int, ...]]:
    """First token, first place, last place, sequence, length, first head: sequence by sequence."""
    found = []
    for sequence, length in enumerate(lengths):
        first, stop = starts[sequence], starts[sequence + 1]
        rows = [(token, head) for token in range(first, stop if length else first) for head in range(group)]
        for at in range(0, len(rows), tile_rows):
            (token, head), (last, _) = rows[at], rows[at : at + tile_rows][-1]
            found.append((token, length - stop + token, length - stop + last, sequence, length, head))
    return found


@given(
    parts=st.lists(parts, min_size=1, max_size=4) | many,
    tile_rows=st.sampled_from([16, 128]),
    group=st.sampled_from([1, 3, 4, 5, 16, 71]),
    first_token=st.integers(0, 40),
    spare=st.integers(0, 60),
    padding=st.integers(0, 3),
)
@settings(max_examples=examples(8, 20, gpu=True), deadline=None)
def test_every_tile_is_listed_once_and_those_with_most_keys_come_first(
    parts: list[tuple[int, int]], tile_rows: int, group: int, first_token: int, spare: int, padding: int
) -> None:
    """Decodes before, sequences without queries, padding behind, and more room than tokens."""
    starts, lengths = [first_token], []
    for num_before, num_new in parts:
        starts.append(starts[-1] + num_new)
        lengths.append(num_before + num_new)
    starts += [starts[-1] + index for index in range(padding)]  # also with a query that is nobody's
    lengths += [0] * padding
    room = starts[-1] - first_token + spare
    given = (torch.tensor(values, dtype=torch.int32, device=DEVICE) for values in (starts, lengths))
    items = [tuple(item) for item in work_list(*given, room, first_token, tile_rows, group).tolist()]
    wanted = sorted(weight_descriptor(starts, lengths, tile_rows, group), key=lambda item: -item[2])
    assert items[: len(wanted)] == wanted
    assert all(item[2] == -1 for item in items[len(wanted) :])
