"""Work that is recorded once and replayed: on a GPU as a CUDA graph, elsewhere by doing it again.

A graph repeats the same launches on the same addresses: the work must read its inputs from tensors that stay in place,
and must not look at what they hold.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Replay = Callable[[], Tensor]


class Recorder:
    """Records work for one device. What its graphs need between their launches they share: only one runs at a time."""

    __slots__ = ("_device", "_pool")

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def record(self, work: Replay) -> Replay:
        """To be called between steps. The work is done once or twice meanwhile."""
        if self._device.type != "cuda":
            return work
        work()  # compiles, and lets libraries take their workspaces, which a capture must not
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = work()

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay
