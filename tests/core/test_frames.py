"""Frames of a socket: the same however they arrive, and none of a connection that ended inside of one."""

import socket
from collections.abc import Iterator
from itertools import accumulate, cycle, repeat
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.worker_process import MAX_FRAME_BYTES, FrameReader, frame_of, receive_bytes


class ShortReads(socket.socket):
    """Returns as many bytes a call as it is told, whatever has arrived."""

    sizes: Iterator[int] = repeat(1 << 20)

    def recv(self, length: int, flags: int = 0, /) -> bytes:
        return super().recv(min(length, next(self.sizes)), flags)


def received(data: bytes, sizes: Iterator[int]) -> list[bytes]:
    """The frames that a reader finds, where calls return so many bytes each."""
    pair = socket.socketpair()
    with ShortReads(fileno=pair[0].detach()) as ours:
        ours.sizes = sizes
        with pair[1] as theirs:
            theirs.sendall(data)
        return list(iter(FrameReader(ours).receive, None))


@given(st.lists(st.binary(max_size=9), max_size=5), st.lists(st.integers(1, 30), min_size=1), st.integers(0, 70))
def test_frames_arrive_whole_however_they_are_cut(frames: list[bytes], sizes: list[int], num_missing: int) -> None:
    data = b"".join(map(frame_of, frames))
    assert received(data, cycle(sizes)) == frames
    left = data[: max(len(data) - num_missing, 0)]
    stops = list(accumulate(4 + len(frame) for frame in frames))
    assert received(left, cycle(sizes)) == frames[: sum(stop <= len(left) for stop in stops)]


def test_a_long_frame_between_short_ones() -> None:
    long = bytes(range(256)) * 3000
    ours, theirs = socket.socketpair()
    sender = Thread(
        target=lambda: theirs.sendall(frame_of(b"start") + frame_of(b"one") + frame_of(long) + frame_of(b"two"))
    )
    with ours, theirs:
        sender.start()
        assert receive_bytes(ours) == b"start", "which leaves what comes after it"
        reader = FrameReader(ours)
        assert [reader.receive() for _ in range(3)] == [b"one", long, b"two"]
        sender.join()


@pytest.mark.parametrize("num_bytes", [MAX_FRAME_BYTES + 1, (1 << 32) - 1])
def test_a_frame_beyond_the_limit_ends_the_connection(num_bytes: int) -> None:
    assert received(num_bytes.to_bytes(4, "big") + b"some of it", repeat(1 << 20)) == []
