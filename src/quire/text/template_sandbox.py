"""Runs chat templates in jinja2's immutable sandbox, with limits on steps and output size.

A template is untrusted code from a model's files. It gets plain data only and no Python internals. Loops, calls,
products and concatenations count against a budget; exceeding it aborts the rendering, with a reason. What the budget
does not see is killed: this runs in `template_worker.py`. Does not depend on messages.
"""

import json
from collections.abc import Iterable, Iterator, Sized
from datetime import datetime
from functools import lru_cache
from types import BuiltinMethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from quire.core.errors import ChatTemplateError

# Far above what a real template needs: a chat of 10,000 messages takes about 100,000 steps.
MAX_STEPS = 1_000_000
# Characters; about four million tokens.
MAX_TEXT = 16 * 1024 * 1024

# A template cannot use these names, as they contain a space.
_BUDGET = "quire budget"
_LOOP = "quire loop"
_CONCAT = "quire concat"


class TemplateTooLargeError(Exception):
    """A template exceeded its budget; the message says which limit."""


class TemplateBudget:
    """The remaining steps of one rendering, and its time of day."""

    __slots__ = ("_steps", "now")

    def __init__(self, now: datetime) -> None:
        self._steps = MAX_STEPS
        self.now = now

    def charge(self, steps: int) -> None:
        self._steps -= steps
        if self._steps < 0:
            raise TemplateTooLargeError(f"it takes more than {MAX_STEPS} steps")

    def measure(self, value: object) -> None:
        if isinstance(value, Sized) and len(value) > MAX_TEXT:
            raise TemplateTooLargeError(f"it writes more than {MAX_TEXT} characters")


def render_sandboxed(template: str, variables: dict[str, object], now: datetime) -> str:
    """Render. Raises `ChatTemplateError`."""
    try:
        return run(template, variables, now)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"The model's chat template is not valid (line {error.lineno}): {error.message}."
        ) from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"The model's chat template refused these messages: {error}") from error
    except TemplateTooLargeError as error:
        raise ChatTemplateError(f"The model's chat template was stopped: {error}.") from error
    except MemoryError as error:
        raise ChatTemplateError("The model's chat template was stopped: it takes too much memory.") from error
    except Exception as error:  # a template is untrusted code: it may raise anything
        raise ChatTemplateError(
            f"The model's chat template failed on these messages: {type(error).__name__}: {error}"
        ) from error


def compile_sandboxed(template: str) -> None:
    """Raise `ChatTemplateError` if the template does not compile."""
    try:
        compiled(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"line {error.lineno} is not valid: {(error.message or '').rstrip('.')}.") from error
    except Exception as error:  # Python's compiler has limits too, e.g. on nesting
        raise ChatTemplateError(f"it is not valid: {type(error).__name__}: {error}.") from error


def run(template: str, variables: dict[str, object], now: datetime) -> str:
    """Render. Raises jinja2's errors, `TemplateTooLargeError`, or any exception of Python in the template."""
    budget = TemplateBudget(now)
    pieces: list[str] = []
    size = 0
    for piece in compiled(template).generate({**variables, _BUDGET: budget}):
        size += len(piece)
        if size > MAX_TEXT:
            raise TemplateTooLargeError(f"it writes more than {MAX_TEXT} characters")
        pieces.append(piece)
    return "".join(pieces)


@lru_cache(maxsize=16)
def compiled(template: str) -> jinja2.Template:
    """Raises jinja2's errors, or any exception of Python's compiler."""
    return _Environment().from_string(template)


def _budget(context: Context) -> TemplateBudget:
    budget = context.parent[_BUDGET]  # not context[...]: `set` cannot write there
    assert isinstance(budget, TemplateBudget)
    return budget


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = _tojson
        self.filters[_LOOP] = _counted
        self.filters[_CONCAT] = _concat
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.globals["namespace"] = _Namespace
        self.globals["dict"] = _make_dict

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Charging().visit(tree)
        return tree

    def call(self, context: Context, function: object, /, *args: object, **kwargs: object) -> object:
        budget = _budget(context)
        budget.charge(1)
        if isinstance(function, BuiltinMethodType) and isinstance(function.__self__, str):
            for value in args:  # a width or a count: reject a large result before it is allocated
                if isinstance(value, int) and value > MAX_TEXT:
                    raise TemplateTooLargeError(f"it calls {function.__name__} with {value}")
        result: object = super().call(context, function, *args, **kwargs)
        budget.measure(result)
        return result

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        _check_operands(operator, left, right)
        result: object = super().call_binop(context, operator, left, right)
        _budget(context).measure(result)
        return result


def _check_operands(operator: str, left: object, right: object) -> None:
    """Reject a large result before it is allocated."""
    sizes = [len(side) if isinstance(side, Sized) else side for side in (left, right)]
    if operator == "*" and all(isinstance(size, int) for size in sizes):
        product = int(sizes[0]) * int(sizes[1])  # type: ignore[call-overload]
        if product > MAX_TEXT and any(isinstance(side, Sized) for side in (left, right)):
            raise TemplateTooLargeError(f"it writes more than {MAX_TEXT} characters")
    if operator == "**" and isinstance(right, int | float) and abs(right) > 64:
        raise TemplateTooLargeError(f"it raises a number to the power {right}")


class _Charging(NodeTransformer):
    """Wraps every loop's iterable, and every `~`, in a filter that charges the budget."""

    def visit_For(self, node: nodes.For) -> nodes.Node:  # noqa: N802  jinja2 names its visitors so
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, _LOOP, [], [], None, None, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        items = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(items, _CONCAT, [], [], None, None, lineno=node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks assistant text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """jinja2's namespace, without names that lead to Python internals."""

    def __init__(self, /, *args: Any, **kwargs: object) -> None:
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _refuse_private(name)
        super().__init__(attributes)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace may not hold {name!r}")


@pass_context
def _counted(context: Context, iterable: Iterable[object]) -> Iterable[object]:
    budget = _budget(context)
    if isinstance(iterable, Sized):
        budget.charge(len(iterable))
        return iterable
    return _charge_each(budget, iterable)


def _charge_each(budget: TemplateBudget, iterable: Iterable[object]) -> Iterator[object]:
    for item in iterable:
        budget.charge(1)
        yield item


@pass_context
def _concat(context: Context, items: list[object]) -> str:
    text = "".join(map(str, items))
    _budget(context).measure(text)
    return text


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers defines it for chat templates: jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


@pass_context
def _strftime_now(context: Context, pattern: str) -> str:
    return _budget(context).now.strftime(pattern)


def _make_dict(*args: Any, **kwargs: object) -> dict[str, object]:
    return dict(*args, **kwargs)
