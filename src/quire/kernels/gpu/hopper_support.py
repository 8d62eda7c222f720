"""Whether the Hopper kernels can be used, and the log line where they cannot. Does not depend on kernels.

They are written in Gluon, a part of Triton that changes between releases. Where Gluon is missing, or a kernel does not
compile, one warning is logged and the portable kernels are used. A separate file: it must load without Gluon.
"""

import logging

import torch
from triton import knobs

_CAPABILITY = (9, 0)
_MAX_LOGGED = 200  # characters of an error
_log = logging.getLogger(__name__)


def hopper_num_sms(missing: str, instead: str) -> int | None:
    """Number of SMs. None where kernels are interpreted, on other GPUs, and where Triton lacks what the kernels need.

    `missing`: the import error, if any; `instead`: what is used in their place, for the log.
    """
    if knobs.runtime.interpret or not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    if torch.cuda.get_device_capability() != _CAPABILITY:
        return None
    if missing:
        _log.warning("%s: %s", instead, missing)
        return None
    return torch.cuda.get_device_properties("cuda").multi_processor_count


def is_unrelated(error: Exception) -> bool:
    """Whether an error is not about the kernel itself: out of memory, or a CUDA graph capture that was invalidated.
    Before a capture everything is launched once, so a kernel that cannot be compiled is known by then."""
    return isinstance(error, torch.OutOfMemoryError) or _is_capturing()


def _is_capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def log_broken(error: Exception, instead: str) -> None:
    """Log that a kernel failed to compile or launch."""
    message = str(error).strip().partition("\n")[0][:_MAX_LOGGED]
    _log.warning("%s: %s: %s", instead, type(error).__name__, message)
