"""Work that is recorded once and replayed: on a GPU as a CUDA graph, elsewhere by doing it again.

A graph repeats the same launches on the same addresses: the work must read its inputs from tensors that stay in place,
and must not look at what they hold.
"""

import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor

from quire.core.garbage import postponed

Replay = Callable[[], Tensor]

_TIMED = 5  # replays whose median counts


class Recorder:
    """Records work for one device. What its graphs need between their launches they share: only one runs at a time."""

    __slots__ = ("_device", "_pool")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def record(self, work: Replay) -> Replay:
        """To be called between steps. On a GPU the work is launched twice and done once meanwhile."""
        if self._device.type != "cuda":
            return work
        work()  # compiles, and lets libraries take their workspaces, which a capture must not
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Two streams, because a capture that fails would leave its own as the current one. No garbage, because freeing
        # the graphs of an engine that nobody has any more would end the capture.
        with (
            postponed(),
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
        ):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay


def seconds_of(replay: Replay, device: torch.device) -> float:
    """How long it takes from its beginning to its end on the device: the median of a few."""
    replay()
    return median(_seconds_once(replay, device) for _ in range(_TIMED))


def _seconds_once(replay: Replay, device: torch.device) -> float:
    if device.type != "cuda":
        begun_s = time.perf_counter()
        replay()
        return time.perf_counter() - begun_s
    begun, done = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begun.record()
    replay()
    done.record()
    done.synchronize()
    return float(begun.elapsed_time(done)) / 1000
