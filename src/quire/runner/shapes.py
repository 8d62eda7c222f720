"""Which shapes of steps are worth recording, the most useful first. Knows sizes alone."""

from quire.runner.recorded import Shape

_FEW_CHUNKS = 4  # most steps begin or go on with a prompt or two
_LONG = 2048  # tokens of one prompt, for which there are other kernels than for several
_CROWDS = (16, 64)  # of chunks
_CROWDED = 8  # tokens of a chunk in a crowd, at the least
_FEWEST_TOKENS = 16


def shapes_to_record(max_rows: int, max_tokens: int) -> list[Shape]:
    """For steps of up to so many rows, and of up to so many tokens in all.

    First what can stand in for every other decode, one row alone, and a prompt that begins while many decode; then
    decodes by halves; then prompts beside fewer rows, and many prompts at once.
    """
    assert max_rows > 0 and max_tokens >= 0, (max_rows, max_tokens)
    decodes = [Shape(rows) for rows in _by_use(row_sizes(max_rows))]
    chunk_sizes = token_sizes(max_tokens)
    beside = [size for size in (max_rows, 0, *row_sizes(max_rows)[-5:-1], 8) if size <= max_rows]
    prompts = [
        Shape(rows, min(chunks, max_rows), tokens)
        for rows in beside
        for tokens in chunk_sizes
        for chunks in ((1, _FEW_CHUNKS) if tokens >= _LONG else (_FEW_CHUNKS,))
    ]
    crowds = [
        Shape(rows, crowd, tokens)
        for crowd in _CROWDS
        for rows in (max_rows, 0)
        for tokens in chunk_sizes
        if crowd <= max_rows and tokens >= _CROWDED * crowd
    ]
    return list(
        dict.fromkeys(
            [*decodes[:2], *(shape for shape in prompts if shape.rows == max_rows), *decodes[2:], *crowds, *prompts]
        )
    )


def row_sizes(max_rows: int) -> tuple[int, ...]:
    """Powers of two, then by sixteens from 32 and by thirty-twos from 128: never twice what is needed."""
    sizes = {1, 2, 4, 8, 16, *range(32, 128, 16), *range(128, max_rows, 32)}
    return (*sorted(size for size in sizes if size < max_rows), max_rows)


def token_sizes(max_tokens: int) -> list[int]:
    """Powers of two, the largest being all that a step may compute; none if that is nothing."""
    if not max_tokens:
        return []
    sizes = [max_tokens]
    while sizes[-1] > 2 * _FEWEST_TOKENS:
        sizes.append(1 << (sizes[-1] - 1).bit_length() - 1)
    return sizes[::-1]


def _by_use(sizes: tuple[int, ...]) -> list[int]:
    """The largest can stand in for every other and the smallest is what one user sees; then by halves between them."""
    first = [sizes[-1], sizes[0]]
    ordered: list[int] = []
    spans = [[size for size in sizes if size not in first]]
    while spans:
        span = spans.pop(0)
        if span:
            middle = len(span) // 2
            ordered.append(span[middle])
            spans += [span[middle + 1 :], span[:middle]]
    return list(dict.fromkeys(first)) + ordered
