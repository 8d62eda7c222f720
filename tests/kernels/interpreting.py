"""Triton's interpreter, made to prepare its language once a launch. Changes nothing of what a kernel computes.

Before a launch the interpreter replaces the functions of `triton.language` by its own, and again, searching them all,
at every call of one kernel function by another, where nothing is left to replace: a third of its time.
"""

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any


def patch_once_a_launch(interpreter: Any) -> None:
    """`interpreter`: the module `triton.runtime.interpreter`. One that is made in another way is left as it is."""
    patch = getattr(interpreter, "_patch_lang", None)
    if patch is None or patch.__module__ == __name__:
        return
    patched: set[str] = set()  # modules, in the launch that runs

    def once(function: Callable[..., object]) -> object:
        needed = _languages(function)
        if patched and needed <= patched:
            return None  # a call from within: nobody restores what it patched
        scope = patch(function)
        if not patched:
            restore = scope.restore

            def end() -> None:
                patched.clear()
                restore()

            scope.restore = end
        patched.update(needed)
        return scope

    interpreter._patch_lang = once


@cache
def _languages(function: Callable[..., object]) -> frozenset[str]:
    """The modules of Triton's language that a kernel function sees."""
    modules = (value.__name__ for value in function.__globals__.values() if inspect.ismodule(value))
    return frozenset(name for name in modules if name.startswith("triton.language"))
