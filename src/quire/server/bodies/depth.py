"""How deep a JSON text is nested, before anybody parses it: in linear time, with no stack and little memory."""

import numpy as np

_OTHERS = bytes(byte for byte in range(256) if byte not in b'[]{}"')
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")] = 1
_STEPS[list(b"]}")] = -1
_BLOCK_BYTES = 1 << 18


def nests_deeper(body: bytes, most: int) -> bool:
    """Whether more than so many lists and objects are open at once."""
    marks = body.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _OTHERS)
    num_quotes = depth = 0
    for start in range(0, len(marks), _BLOCK_BYTES):
        block = np.frombuffer(marks, np.uint8, min(_BLOCK_BYTES, len(marks) - start), start)
        quotes = num_quotes + np.cumsum(block == ord('"'))
        depths = depth + np.cumsum(np.where(quotes % 2, 0, _STEPS[block]))
        if depths.max() > most:
            return True
        num_quotes, depth = int(quotes[-1]), int(depths[-1])
    return False
