"""Grammars of requests are compiled in a process that is killed when it takes too much, and clients take turns."""

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import InvalidGrammar, InvalidParameter, QuireError
from quire.core.sampling import Grammar, GrammarKind
from quire.grammar import limits
from quire.server.grammar_precompiler import CompilersBusy, CompileWorker, FairSlots, GrammarPrecompiler
from quire.server.http.request_context import CURRENT_CONTEXT, RequestContext
from quire.text.tokenizer import Tokenizer
from tests.grammar.conftest import byte_fallback as byte_fallback

JSON, REGEX, LARK = GrammarKind.JSON_SCHEMA, GrammarKind.REGEX, GrammarKind.LARK


@pytest.fixture(scope="module")
def worker(byte_fallback: Tokenizer) -> Iterator[CompileWorker]:
    running = CompileWorker(byte_fallback, byte_fallback.end_ids, byte_fallback.vocab_size)
    yield running
    running.close()


def schema(value: object) -> Grammar:
    return Grammar(JSON, json.dumps(value))


def referring(depth: int, fan_out: int, leaf: dict[str, object], keyword: str = "allOf") -> Grammar:
    """Definitions that refer to the next one several times each: a tree of fan_out ** depth leaves."""
    definitions: dict[str, object] = {
        f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * fan_out} for n in range(depth)
    }
    return schema({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{depth}": leaf}})


def await_no_children(worker: CompileWorker) -> None:
    """A child that has replied still has to exit; the test's timeout bounds this."""
    pid = worker.start().pid
    while Path(f"/proc/{pid}/task/{pid}/children").read_text():
        time.sleep(0.001)


OPTIONAL = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}}
DATE: dict[str, object] = {"type": "string", "format": "date"}
BOMBS = {
    "a pattern": referring(14, 4, {"type": "string", "pattern": "a.*b"}),
    "dates": referring(7, 4, DATE),
    "two at a time": referring(30, 2, {"type": "string", "format": "email"}),
    "beside a keyword": referring(12, 3, {"type": "integer", "minimum": 1}),
    "alternatives of each": schema(
        {"allOf": [{"anyOf": [{"minimum": 7 * n + m} for m in range(6)]} for n in range(8)]}
    ),
    "a tool's arguments": Grammar(LARK, f"start: %json {referring(9, 4, DATE).text}"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_schema_that_expands_is_refused_by_its_expanded_size(worker: CompileWorker, name: str) -> None:
    with pytest.raises(InvalidGrammar, match=f"expand to .* parts; the limit is {limits.EXPANDED_SCHEMAS}"):
        worker.compile(BOMBS[name])


@pytest.mark.parametrize(
    "grammar",
    [
        referring(4, 4, DATE),
        referring(40, 1, DATE),
        referring(12, 4, OPTIONAL, "anyOf"),  # alternatives alone are not combined
        schema({"$defs": {"x": OPTIONAL}, "properties": {f"p{n}": {"$ref": "#/$defs/x"} for n in range(200)}}),
        schema(
            {
                "$defs": {"t": {"allOf": [{"properties": {"next": {"$ref": "#/$defs/t"}}}, OPTIONAL]}},
                "$ref": "#/$defs/t",
            }
        ),
    ],
)
def test_references_that_do_not_expand_are_compiled(worker: CompileWorker, grammar: Grammar) -> None:
    process = worker.start()
    worker.compile(grammar)  # or it raises
    assert worker.start() is process, "the worker itself has lasted"


def test_alternatives_that_fail_after_the_first_token_are_refused(worker: CompileWorker) -> None:
    nested: dict[str, object] = OPTIONAL
    for _ in range(3):
        nested = {"anyOf": [nested] * 6}
    with pytest.raises(InvalidGrammar, match="too large or too slow") as refused:
        worker.compile(schema(nested))
    assert (refused.value.status, refused.value.code) == (400, "invalid_grammar")


COSTLY = schema({"enum": [f"{n} of a number of long alternatives" for n in range(1200)], "$defs": {}})  # 50 KB of text
TOO_LARGE = r"compiling it took more than .* of CPU time, or .* MiB"


@pytest.mark.parametrize(
    ("limit", "value", "error", "reason"),
    [
        ("COMPILE_CPU_S", 0.001, InvalidGrammar, TOO_LARGE),
        ("COMPILE_BYTES", 0, InvalidGrammar, TOO_LARGE),
        ("COMPILE_WALL_S", 0.001, CompilersBusy, "this machine is busy"),
    ],
)
def test_beyond_a_limit_the_child_is_killed_and_the_worker_continues(
    worker: CompileWorker,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: float,
    error: type[QuireError],
    reason: str,
) -> None:
    pid = worker.start().pid
    with monkeypatch.context() as lowered:
        lowered.setattr(limits, limit, value)
        for _ in range(2):
            with pytest.raises(error, match=reason):
                worker.compile(COSTLY)
    worker.compile(COSTLY)
    assert worker.start().pid == pid, "the same worker"
    await_no_children(worker)


def test_a_killed_worker_is_replaced_and_the_grammar_is_compiled(worker: CompileWorker) -> None:
    before = worker.start().pid
    os.kill(before, signal.SIGKILL)
    worker.compile(schema(OPTIONAL))
    assert worker.start().pid != before


def test_a_vocabulary_that_cannot_be_used_is_an_error_of_the_model(byte_fallback: Tokenizer) -> None:
    unending = CompileWorker(byte_fallback, (), byte_fallback.vocab_size)
    with pytest.raises(QuireError, match="names no end token"):
        unending.compile(schema(OPTIONAL))


def test_a_model_without_a_tokenizer_refuses_grammars() -> None:
    with pytest.raises(InvalidParameter, match="no tokenizer") as refused:
        asyncio.run(GrammarPrecompiler(CompileWorker(None, (), 8)).check(schema(OPTIONAL), "response_format"))
    assert refused.value.param == "response_format"


class Blocked(CompileWorker):
    """Compiles nothing until it is released."""

    def __init__(self) -> None:
        super().__init__(None, (), 8)
        self.released = threading.Event()
        self.begun: list[str] = []

    def compile(self, grammar: Grammar) -> None:
        self.begun.append(grammar.text)
        assert self.released.wait(60)


def regex(text: str) -> Grammar:
    return Grammar(REGEX, text)


async def check_as(name: str, precompiler: GrammarPrecompiler, text: str) -> None:
    CURRENT_CONTEXT.set(RequestContext("0", 0.0, client=name))
    await precompiler.check(regex(text), "structured_outputs")


async def begun(worker: Blocked, count: int) -> None:
    while len(worker.begun) < count:
        await asyncio.sleep(0.001)


def test_a_client_with_many_grammars_delays_only_its_own() -> None:
    async def crowd() -> None:
        worker = Blocked()
        precompiler = GrammarPrecompiler(worker, patience_s=60)
        greedy = [asyncio.create_task(check_as("greedy", precompiler, f"g{n}")) for n in range(8)]
        await begun(worker, 1)
        modest = asyncio.create_task(check_as("modest", precompiler, "m"))
        await begun(worker, 2)
        assert worker.begun == ["g0", "m"], "the second slot is never the first client's"
        worker.released.set()
        await asyncio.gather(modest, *greedy)
        assert sorted(worker.begun) == ["g0", "g1", "g2", "g3", "g4", "g5", "g6", "g7", "m"]
        precompiler.close()

    asyncio.run(crowd())


def test_without_a_free_process_it_is_a_503_and_an_accepted_grammar_needs_none() -> None:
    async def crowd() -> None:
        worker = Blocked()
        worker.released.set()
        precompiler = GrammarPrecompiler(worker, patience_s=60)
        await check_as("a", precompiler, "known")
        worker.released.clear()
        busy = [asyncio.create_task(check_as(name, precompiler, name)) for name in ("a", "b")]
        await begun(worker, 3)
        precompiler._patience_s = 0.0
        with pytest.raises(CompilersBusy, match="for 0 s") as refused:
            await check_as("c", precompiler, "another")
        assert (refused.value.status, refused.value.retry_after_s) == (503, 2.0)
        await check_as("c", precompiler, "known")
        for task in busy:  # the clients leave: their slots are free when the compilations end
            task.cancel()
        await asyncio.gather(*busy, return_exceptions=True)
        with pytest.raises(CompilersBusy):
            await check_as("a", precompiler, "another")
        worker.released.set()
        precompiler._patience_s = 60
        await check_as("a", precompiler, "another")
        assert "another" in worker.begun
        precompiler.close()

    asyncio.run(crowd())


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(["acquire", "release", "cancel"])), max_size=40),
    st.sampled_from([(2, 1), (4, 2), (3, 2)]),
)
def test_slots_are_never_exceeded_and_none_is_idle_while_a_name_could_use_it(
    moves: list[tuple[str, str]], sizes: tuple[int, int]
) -> None:
    num_slots, num_per_name = sizes

    async def play() -> None:
        slots = FairSlots(num_slots, num_per_name)
        waiting: list[tuple[str, asyncio.Task[None]]] = []
        held: list[str] = []
        for name, move in moves:
            if move == "acquire":
                waiting.append((name, asyncio.create_task(slots.acquire(name))))
            elif move == "release" and name in held:
                slots.release(name)
                held.remove(name)
            elif move == "cancel":
                for _, task in [pair for pair in waiting if pair[0] == name][:1]:
                    task.cancel()
            for _ in range(4):
                await asyncio.sleep(0)
            held += [given_to for given_to, task in waiting if task.done() and not task.cancelled()]
            waiting = [(given_to, task) for given_to, task in waiting if not task.done()]
            full = {name for name in held if held.count(name) >= num_per_name}
            assert len(held) <= num_slots and all(held.count(name) <= num_per_name for name in full)
            assert len(held) == num_slots or {given_to for given_to, _ in waiting} <= full
        for _, task in waiting:
            task.cancel()

    asyncio.run(play())


def test_a_slot_that_is_granted_to_a_client_that_leaves_is_free_again() -> None:
    async def leave() -> None:
        slots = FairSlots(1)
        await slots.acquire("a")
        leaves = asyncio.create_task(slots.acquire("b"))
        await asyncio.sleep(0)
        slots.release("a")  # grants it to b, which leaves before it knows
        leaves.cancel()
        await asyncio.gather(leaves, return_exceptions=True)
        await asyncio.wait_for(slots.acquire("c"), 60)

    asyncio.run(leave())


def test_clients_that_wait_take_turns_however_many_requests_each_has() -> None:
    async def crowd() -> list[str]:
        slots, served = FairSlots(1), list[str]()

        async def work(name: str) -> None:
            await slots.acquire(name)
            served.append(name)
            slots.release(name)

        await slots.acquire("first")
        waiting = [asyncio.create_task(work(name)) for name in "aaabbc"]
        await asyncio.sleep(0)
        slots.release("first")
        await asyncio.gather(*waiting)
        return served

    assert asyncio.run(crowd()) == ["a", "b", "c", "a", "b", "a"]


class Counting(CompileWorker):
    """Accepts any grammar, and counts them."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def compile(self, grammar: Grammar) -> None:
        self.texts.append(grammar.text)

    def close(self) -> None: ...


def test_accepted_grammars_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used first; else a server would remember each grammar that it was ever sent."""
    monkeypatch.setattr("quire.server.grammar_precompiler._MAX_ACCEPTED", 3)
    worker = Counting()
    precompiler = GrammarPrecompiler(worker)

    async def check_all() -> None:
        for text in "abcabcda":  # a, b and c are known the second time; d takes the place of a
            await precompiler.check(regex(text), "grammar")

    asyncio.run(check_all())
    precompiler.close()
    assert worker.texts == [*"abcd", "a"]
