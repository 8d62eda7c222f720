"""A process that does not outlive the one that made it, however that one ends. Knows nothing of either."""

import ctypes
import os
import signal
import sys

FOR_THE_PARENT = (signal.SIGINT, signal.SIGTERM)  # what people send to a terminal's programs; it ends its child itself

_PR_SET_PDEATHSIG = 1
# Found once: a forked child, which may come here, must look for no library.
_prctl = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


def die_with(parent: int) -> bool:
    """From now on, on Linux. False: the parent with this number is gone already."""
    if _prctl is not None:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    return os.getppid() == parent
