"""Sees to it that a grammar can be followed before anything is queued for it. Knows no engine, which compiles again."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from quire.core.errors import InvalidGrammar, InvalidParameter, QuireError
from quire.core.grammar import Grammar
from quire.grammar.compiler import Compiler
from quire.grammar.tokens import Vocabulary
from quire.text.tokenizer import Tokenizer

_NUM_THREADS = 2


class Constrainer:
    """Compiles what clients send, on threads of its own; what it compiled lately it knows to be right."""

    def __init__(
        self, tokenizer: Tokenizer | None, end_ids: Sequence[int], vocab_size: int, *, deadline_s: float = 5.0
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = tuple(end_ids)
        self._vocab_size = vocab_size
        self._deadline_s = deadline_s
        self._compiler: Compiler | None = None
        self._making = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    def warm(self) -> None:
        """Begin to read the vocabulary. Should that fail, whoever sends the first grammar is told why."""
        self._threads.submit(self._made)

    async def check(self, grammar: Grammar, param: str) -> None:
        """Refuse a grammar that cannot be followed; `param` is the field that asked for it."""
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, grammar)
        try:
            await asyncio.wait_for(compiling, self._deadline_s)
        except TimeoutError as error:
            raise InvalidGrammar(
                f"The {grammar.kind.value} was not compiled within {self._deadline_s:g} s; make it simpler.",
                param=param,
            ) from error
        except QuireError as error:
            error.param = error.param or param
            raise

    def _compile(self, grammar: Grammar) -> None:
        self._made().compile(grammar)

    def _made(self) -> Compiler:
        with self._making:
            if self._compiler is None:
                if self._tokenizer is None:
                    raise InvalidParameter("This model has no tokenizer, so that its answers cannot be constrained.")
                self._compiler = Compiler(Vocabulary(self._tokenizer, self._end_ids, self._vocab_size))
            return self._compiler
