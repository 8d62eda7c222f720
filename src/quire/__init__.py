"""quire: an LLM inference and serving engine.

    from quire import LLM, SamplingParams

Names are loaded when they are first used: `import quire` alone loads no torch.
"""

import sys
from importlib import import_module

from quire.version import __version__

TYPE_CHECKING = False  # as type checkers read it; importing typing takes as long as all the rest of a Python start
if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.core.errors import QuireError
    from quire.core.sampling import Grammar, GrammarKind, SamplingParams
    from quire.engine.outputs import (
        CompletionOutput,
        Delta,
        EmbeddingOutput,
        FunctionCall,
        RequestOutput,
        ScoringOutput,
    )
    from quire.llm import LLM

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "Delta",
    "EmbeddingOutput",
    "FunctionCall",
    "Grammar",
    "GrammarKind",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "__version__",
]

_HOMES = {
    "AsyncLLM": "quire.async_llm",
    "LLM": "quire.llm",
    "FunctionCall": "quire.engine.outputs",
    "Grammar": "quire.core.sampling",
    "GrammarKind": "quire.core.sampling",
    "SamplingParams": "quire.core.sampling",
    "ScoringOutput": "quire.engine.outputs",
    "QuireError": "quire.core.errors",
    "CompletionOutput": "quire.engine.outputs",
    "Delta": "quire.engine.outputs",
    "EmbeddingOutput": "quire.engine.outputs",
    "RequestOutput": "quire.engine.outputs",
}

NOT_ON_WINDOWS = (
    "quire does not run on Windows: file locks, signals and processes are used as Linux and macOS have them. "
    "Install it inside WSL 2, which is Linux."
)


def __getattr__(name: str) -> object:
    if sys.platform == "win32" and name in _HOMES:
        raise ImportError(NOT_ON_WINDOWS)
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
