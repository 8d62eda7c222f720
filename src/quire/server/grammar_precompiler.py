"""Compiles the grammar of a request before the request is queued. The engine compiles it again."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from quire.core.errors import InvalidGrammar, InvalidParameter, QuireError
from quire.core.sampling import Grammar
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.vocabulary import GrammarVocabulary
from quire.text.tokenizer import Tokenizer

_NUM_THREADS = 2


class CompilersBusy(QuireError):
    """No thread was free to compile a grammar: the cause is load, not the grammar."""

    status = 503
    code = "compilers_busy"
    retry_after_s = 2.0


class GrammarPrecompiler:
    """Compiles grammars of requests on a thread pool. Recently compiled ones are accepted from the cache.

    A compile cannot be cancelled: after its deadline it holds its thread until it ends, about a second under the limits
    on grammars. `patience_s` bounds the wait for a free thread and the vocabulary, `deadline_s` the compile.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        end_ids: Sequence[int],
        vocab_size: int,
        *,
        patience_s: float = 5.0,
        deadline_s: float = 5.0,
    ) -> None:
        self._tokenizer = tokenizer
        self._end_ids = tuple(end_ids)
        self._vocab_size = vocab_size
        self._patience_s = patience_s
        self._deadline_s = deadline_s
        self._compiler: GrammarCompiler | None = None
        self._making = threading.Lock()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    def warm(self) -> None:
        """Start reading the vocabulary. If that fails, the first request with a grammar gets the error."""
        self._threads.submit(self._get_compiler)

    async def check(self, grammar: Grammar, param: str) -> None:
        """Raise if a grammar does not compile; `param` is the field of the request that has it."""
        if self._compiler is not None and self._compiler.knows(grammar):
            return
        begun: Future[None] = Future()
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, grammar, begun)
        try:
            await self._thread_free(begun)
            await asyncio.wait_for(compiling, self._deadline_s)
        except TimeoutError as error:
            raise InvalidGrammar(
                f"The {grammar.kind.value} was not compiled within {self._deadline_s:g} s; make it simpler.",
                param=param,
            ) from error
        except QuireError as error:
            error.param = error.param or param
            raise

    async def _thread_free(self, begun: "Future[None]") -> None:
        """Wait for a free thread."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(begun), self._patience_s)
        except TimeoutError as error:
            raise CompilersBusy(
                f"All {_NUM_THREADS} threads that compile grammars were busy for {self._patience_s:g} s; try again."
            ) from error

    def _compile(self, grammar: Grammar, begun: "Future[None]") -> None:
        if not begun.set_running_or_notify_cancel():
            return  # the request has timed out
        try:
            compiler = self._get_compiler()
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(None)
        compiler.compile(grammar)

    def _get_compiler(self) -> GrammarCompiler:
        with self._making:
            if self._compiler is None:
                if self._tokenizer is None:
                    raise InvalidParameter("This model has no tokenizer, so its output cannot be constrained.")
                self._compiler = GrammarCompiler(GrammarVocabulary(self._tokenizer, self._end_ids, self._vocab_size))
            return self._compiler
