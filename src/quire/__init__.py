"""quire: an LLM inference and serving engine.

    from quire import LLM, SamplingParams

Names are loaded when they are first used: `import quire` alone loads no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from quire.version import __version__

if TYPE_CHECKING:
    from quire.core.errors import QuireError
    from quire.core.sampling import SamplingParams
    from quire.engine.outputs import CompletionOutput, Delta, EmbeddingOutput, RequestOutput
    from quire.llm import LLM

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "EmbeddingOutput",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_HOMES = {
    "LLM": "quire.llm",
    "SamplingParams": "quire.core.sampling",
    "QuireError": "quire.core.errors",
    "CompletionOutput": "quire.engine.outputs",
    "Delta": "quire.engine.outputs",
    "EmbeddingOutput": "quire.engine.outputs",
    "RequestOutput": "quire.engine.outputs",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
