"""What an answer may say: response_format and structured_outputs as one `Grammar`. Compiles nothing.

Sees to it that a grammar can be followed before anything is queued for it. Knows no engine, which compiles again.
"""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from quire.core.errors import InvalidGrammar, InvalidParameter, QuireError, shown
from quire.core.sampling import Grammar, GrammarKind
from quire.grammar.compiler import GrammarCompiler
from quire.grammar.vocabulary import GrammarVocabulary
from quire.server.openai.decode import MAX_DEPTH, nests_deeper
from quire.server.openai.schema import Json, ResponseFormat, SamplingBody, StructuredOutputs
from quire.text.tokenizer import Tokenizer

MAX_CHOICES = 1024
_KINDS = ("json", "json_object", "regex", "choice", "grammar")
_NOT_SERVED = {
    "structural_tag": "use tools",
    "whitespace_pattern": "the server chooses which white space JSON may have",
    "disable_any_whitespace": "the server chooses which white space JSON may have",
    "disable_additional_properties": 'write "additionalProperties": false into the schema',
}


def grammar_of(body: SamplingBody) -> Grammar | None:
    """None where an answer is free."""
    formatted = None if body.response_format is None else _formatted(body.response_format)
    structured = None if body.structured_outputs is None else _structured(body.structured_outputs)
    if formatted is not None and structured is not None:
        raise InvalidParameter(
            "response_format and structured_outputs both say what the answer may be; give one of them.",
            param="structured_outputs",
        )
    return formatted or structured


def _formatted(wanted: ResponseFormat) -> Grammar | None:
    if wanted.schema is not None:  # llama.cpp's way
        raise InvalidParameter(
            'response_format.schema is not served here; use {"type": "json_schema", "json_schema": {"schema": …}}.',
            param="response_format.schema",
        )
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case "json_schema":
            schema = None if wanted.json_schema is None else wanted.json_schema.schema
            return Grammar(GrammarKind.JSON_SCHEMA, _schema_text(schema, "response_format.json_schema.schema"))
    raise InvalidParameter(
        f"response_format.type is {shown(wanted.type)}; it may be 'text', 'json_object' or 'json_schema'. Other "
        f"constraints go into structured_outputs.",
        param="response_format.type",
    )


def _structured(wanted: StructuredOutputs) -> Grammar:
    for name, instead in _NOT_SERVED.items():
        if getattr(wanted, name) not in (None, False):
            raise _refused(name, f"it is not served here; {instead}")
    said = [name for name in _KINDS if getattr(wanted, name) is not None]
    if wanted.json_object is False:
        said.remove("json_object")
    if len(said) != 1:
        raise InvalidParameter(
            f"structured_outputs says {' and '.join(said) or 'nothing'}; an answer follows one of {', '.join(_KINDS)}.",
            param="structured_outputs",
        )
    match said[0]:
        case "json":
            return Grammar(GrammarKind.JSON_SCHEMA, _schema_text(wanted.json, "structured_outputs.json"))
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case "regex":
            return Grammar(GrammarKind.REGEX, _text(wanted.regex, "regex"))
        case "choice":
            return Grammar(GrammarKind.CHOICE, _choices(wanted.choice or []))
    return Grammar(GrammarKind.LARK, _text(wanted.grammar, "grammar"))


def _schema_text(schema: Json, where: str) -> str:
    """The schema as compact JSON. vLLM's clients may send it as a text of JSON."""
    if isinstance(schema, str):
        if nests_deeper(schema.encode(), MAX_DEPTH):
            raise InvalidParameter(f"{where} is nested more than {MAX_DEPTH} levels deep.", param=where)
        try:
            schema = msgspec.json.decode(schema)
        except ValueError as error:
            raise InvalidParameter(f"{where} is a text that is not JSON: {error}.", param=where) from error
    if schema is False:
        raise InvalidParameter(f"{where} is false, a schema that no answer fulfils.", param=where)
    if not isinstance(schema, dict | bool):
        raise InvalidParameter(f"{where} must be a JSON schema: an object, not {shown(schema)}.", param=where)
    return msgspec.json.encode(schema).decode()


def _choices(choices: list[str]) -> str:
    if not 1 <= len(choices) <= MAX_CHOICES or not all(choices):
        raise _refused("choice", f"it must hold 1 to {MAX_CHOICES} texts that are not empty, not {len(choices)}")
    return msgspec.json.encode(choices).decode()


def _text(text: str | None, name: str) -> str:
    if not text:
        raise _refused(name, "it is empty")
    return text


def _refused(name: str, reason: str) -> QuireError:
    param = f"structured_outputs.{name}"
    return InvalidParameter(f"{param}: {reason}.", param=param)


_NUM_THREADS = 2


class CompilersBusy(QuireError):
    """Nobody was free to compile a grammar: load, and not the grammar's fault."""

    status = 503
    code = "compilers_busy"
    retry_after_s = 2.0


class GrammarPrecompiler:
    """Compiles what clients send, on threads of its own; what it compiled lately it knows to be right.

    A compile cannot be stopped: one that is given up keeps its thread until it ends, which the limits of grammars make
    about a second of work. `patience_s` is for a free thread and for the vocabulary, `deadline_s` for the compile.
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
        """Begin to read the vocabulary. Should that fail, whoever sends the first grammar is told why."""
        self._threads.submit(self._made)

    async def check(self, grammar: Grammar, param: str) -> None:
        """Refuse a grammar that cannot be followed; `param` is the field that asked for it."""
        if self._compiler is not None and self._compiler.knows(grammar):
            return
        begun: Future[None] = Future()
        compiling = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, grammar, begun)
        try:
            await self._free(begun)
            await asyncio.wait_for(compiling, self._deadline_s)
        except TimeoutError as error:
            raise InvalidGrammar(
                f"The {grammar.kind.value} was not compiled within {self._deadline_s:g} s; make it simpler.",
                param=param,
            ) from error
        except QuireError as error:
            error.param = error.param or param
            raise

    async def _free(self, begun: "Future[None]") -> None:
        """Until a thread takes the grammar up. Where none does in time, none will."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(begun), self._patience_s)
        except TimeoutError as error:
            raise CompilersBusy(
                f"All {_NUM_THREADS} threads that compile grammars were busy for {self._patience_s:g} s; try again."
            ) from error

    def _compile(self, grammar: Grammar, begun: "Future[None]") -> None:
        if not begun.set_running_or_notify_cancel():
            return  # nobody waits for it any more
        try:
            compiler = self._made()
        except BaseException as error:
            begun.set_exception(error)
            return
        begun.set_result(None)
        compiler.compile(grammar)

    def _made(self) -> GrammarCompiler:
        with self._making:
            if self._compiler is None:
                if self._tokenizer is None:
                    raise InvalidParameter("This model has no tokenizer, so that its answers cannot be constrained.")
                self._compiler = GrammarCompiler(GrammarVocabulary(self._tokenizer, self._end_ids, self._vocab_size))
            return self._compiler
