"""Whether kernels for Hopper can be used here, and what is said where they cannot. Knows no kernel.

They are written in Gluon, a part of Triton that changes from release to release: where it is missing, or a kernel
cannot be compiled, that is told in one line, and others do the work.
"""

import logging

import torch
from triton import knobs

_CAPABILITY = (9, 0)
_MOST_TOLD = 200  # characters of an error
_log = logging.getLogger(__name__)


def hopper_processors(missing: str, instead: str) -> int | None:
    """Of the card. None where kernels are interpreted, on other cards, and where something is missing in Triton.

    `instead`: who does what in their place.
    """
    if knobs.runtime.interpret or not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    if torch.cuda.get_device_capability() != _CAPABILITY:
        return None
    if missing:
        _log.warning("%s: %s", instead, missing)
        return None
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def is_elsewhere(error: Exception) -> bool:
    """Whether it says nothing of the kernel that was launched: there is no memory, or what is being recorded has come
    to an end. Before that all is launched once: a kernel which cannot be compiled is known by then."""
    return isinstance(error, torch.OutOfMemoryError) or _is_recording()


def _is_recording() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def tell_broken(error: Exception, instead: str) -> None:
    """A kernel was tried and failed."""
    said = str(error).strip().partition("\n")[0][:_MOST_TOLD]
    _log.warning("%s: %s: %s", instead, type(error).__name__, said)
