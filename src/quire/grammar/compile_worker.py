"""`python -m quire.grammar.compile_worker FD`: compiles clients' grammars, each in a process of its own.

This process reads the vocabulary once. Per grammar it is given a socket and forks: the child sets its limits, compiles,
replies and exits, so that its memory is freed whatever happened, and a grammar that exceeds a limit kills the child
only. The kernel ends the child; no process has to watch it. A compiled grammar cannot be sent: the engine compiles an
accepted one again, at a cost that is known by then.
"""

import os
import random
import signal
import socket
import sys
import time
from typing import Any

import numpy as np

from quire.core.errors import GrammarFailed, InvalidGrammar, QuireError
from quire.core.ids import IntArray
from quire.core.process import freeze_heap
from quire.core.sampling import Grammar, GrammarKind
from quire.core.worker_process import connect, limit_memory, limit_time, receive_frame, send_frame
from quire.grammar import limits
from quire.grammar.compiler import CompiledGrammar, GrammarCompiler
from quire.grammar.vocabulary import GrammarVocabulary, TokenSpelling

# Outputs that are followed to try out a grammar, and tokens of each; within some CPU time, as masks may be slow.
_NUM_OUTPUTS = 6
_NUM_TOKENS = 48
_TRIAL_CPU_S = 0.2  # 20 ms for an ordinary schema
_MAX_SLOW = 1  # tokens that may take longer than the first: a virtual machine charges for time it did not get
_CLOSING = ('"', "}", "]", ",", ":", '":', '",', "0", "1")  # taken half the time, so that JSON's parts end
_LOWER_PRIORITY = 5  # the engine and the server come first


class VocabularyMessage:
    """The part of a tokenizer that was sent to this process."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.vocab_size: int = fields["vocab_size"]
        self._json: str = fields["json"]
        self._unknown = frozenset(fields["unknown"])

    def id_to_piece(self, token_id: int) -> str | None:
        return None if token_id in self._unknown else ""

    def to_json(self) -> str:
        return self._json


def start_message(spelling: TokenSpelling, end_ids: tuple[int, ...], width: int) -> dict[str, Any]:
    """The first message to this process: what a vocabulary is made from."""
    unknown = [token_id for token_id in range(width) if spelling.id_to_piece(token_id) is None]
    fields = {"vocab_size": spelling.vocab_size, "json": spelling.to_json(), "unknown": unknown}
    return {"spelling": fields, "end_ids": end_ids, "width": width}


def compile_message(grammar: Grammar) -> dict[str, Any]:
    """The message to a child: the grammar, and what it may take to compile it."""
    allowed = {"cpu_s": limits.COMPILE_CPU_S, "wall_s": limits.COMPILE_WALL_S, "num_bytes": limits.COMPILE_BYTES}
    return {"kind": grammar.kind.value, "text": grammar.text, **allowed}


def error_of(reply: dict[str, Any]) -> QuireError | None:
    """The error in a reply, if there is one."""
    if "error" not in reply:
        return None
    error = InvalidGrammar(reply["error"])
    error.code, error.status = reply["code"], reply["status"]
    return error


def _error_reply(error: QuireError) -> dict[str, Any]:
    return {"error": error.message, "code": error.code, "status": error.status}


def main(descriptor: str) -> None:
    connection = connect(descriptor)
    os.nice(_LOWER_PRIORITY)
    start: Any = receive_frame(connection)
    if start is None:
        return
    try:
        vocabulary = GrammarVocabulary(VocabularyMessage(start["spelling"]), tuple(start["end_ids"]), start["width"])
    except QuireError as error:
        send_frame(connection, _error_reply(error))
        return
    compiler = GrammarCompiler(vocabulary)
    freeze_heap()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps children
    send_frame(connection, {})
    while True:
        received, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        if not received:
            return
        if os.fork() == 0:
            try:
                connection.close()
                _compile_one(compiler, socket.socket(fileno=descriptors[0]))
            finally:
                os._exit(0)
        os.close(descriptors[0])


def _try_out(compiled: CompiledGrammar) -> None:
    """Follow some outputs for a few tokens: a grammar may exceed a limit only after its first token."""
    vocabulary = compiled.vocabulary
    closing = sorted({token for text in _CLOSING for token in vocabulary.tokens.tokenize_str(text)})
    chance = random.Random(0)
    mask = np.zeros(vocabulary.num_words, np.int32)
    begun_s = time.thread_time()
    num_slow = 0
    for _ in range(_NUM_OUTPUTS):
        matcher = compiled.matcher()
        for _ in range(_NUM_TOKENS):
            token_s = time.thread_time()
            if matcher.stopped or token_s - begun_s > _TRIAL_CPU_S:
                break
            if not matcher.fill_mask(mask) or not matcher.advance(_any_token(mask, closing, chance)):
                raise GrammarFailed()
            num_slow += time.thread_time() - token_s > limits.FIRST_MASK_CPU_S
            if num_slow > _MAX_SLOW:
                raise GrammarFailed()


def _any_token(mask: IntArray, closing: list[int], chance: random.Random) -> int:
    """A random token that a mask allows: half the time one of `closing`, if one is allowed."""
    likely = [token for token in closing if mask[token >> 5] >> (token & 31) & 1]
    if likely and chance.random() < 0.5:
        return chance.choice(likely)
    word = chance.choice(np.flatnonzero(mask).tolist())
    return 32 * int(word) + chance.choice([bit for bit in range(32) if int(mask[word]) >> bit & 1])


def _compile_one(compiler: GrammarCompiler, connection: socket.socket) -> None:
    """In a child. What native code prints when it is out of memory or panics is not for the server's log."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    send_frame(connection, {})  # begun: if no reply follows, the grammar is the reason
    message: Any = receive_frame(connection)
    if message is None:
        return
    limit_time(message["cpu_s"], message["wall_s"])
    limit_memory(message["num_bytes"])
    try:
        _try_out(compiler.compile(Grammar(GrammarKind(message["kind"]), message["text"])))
        reply = {}
    except QuireError as error:
        reply = _error_reply(error)
    except MemoryError:
        return  # as if it had been killed
    except BaseException as error:  # a panic of llguidance is no Exception
        reply = _error_reply(
            InvalidGrammar(f"The grammar cannot be compiled: {str(error)[: limits.REASON_CHARACTERS]}")
        )
    send_frame(connection, reply)


if __name__ == "__main__":
    main(sys.argv[1])
