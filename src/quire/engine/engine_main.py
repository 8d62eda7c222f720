"""`python -m quire.engine.engine_main FD PARENT`: an engine in its own process, connected by an inherited socket.

With `--import-first` it imports torch before it knows what to serve. Torch's libraries are loaded in a thread while
the engine is imported, so this module imports little. It exits with its parent: PDEATHSIG on Linux,
and a closed socket everywhere. Terminal signals (SIGINT, SIGTERM) are handled by the parent, which lets the engine
finish its work.
"""

import logging
import os
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from quire.core.errors import ConfigError, QuireError
from quire.core.process import die_with_parent, freeze_heap, gc_frozen_imports, leave_signals_to_parent
from quire.engine.startup import IMPORT_FIRST, StartupReporter, import_without_torch, preload_torch

if TYPE_CHECKING:
    from quire.engine.block_transport import BlockTransport
    from quire.engine.engine import Engine
    from quire.engine.kv_event_publisher import KvEventPublisher
    from quire.engine.kv_events import KvEventsConfig
    from quire.engine.messages import StartEngine
    from quire.engine.prefix_transfer import KvTransport
    from quire.engine.stats import EngineInfo
    from quire.engine.wire import Message


def main(descriptor: int, parent: int, import_first: bool = False) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s", stream=sys.stderr)
    leave_signals_to_parent()
    if not die_with_parent(parent):
        return 0
    connection = socket.socket(fileno=descriptor)
    _import_engine(with_torch=import_first)
    from quire.engine.engine_server import EngineServer
    from quire.engine.messages import LoadProgress, Refused

    start = _read_start(connection)
    if start is None:
        return 0
    reporter = StartupReporter(
        loading=lambda done, total: _send(connection, LoadProgress(done, total)),
        finished=lambda phase: _send(connection, phase),
    )
    try:
        engine, info = _build(start, reporter)
        publisher = None if start.kv_events is None else _publisher(start.kv_events, engine)
    except QuireError as error:
        _send(connection, Refused(None, error))
        return error.exit_code
    freeze_heap()
    _send(connection, info)
    EngineServer(engine, connection, time.monotonic, publisher).run()
    return 0


def _import_engine(*, with_torch: bool) -> None:
    """What needs no torch is imported while torch's libraries are loaded."""
    with gc_frozen_imports():
        if with_torch:
            preload_torch()
        import_without_torch()
        import quire.engine.engine_server

        if with_torch:
            import quire.engine.build  # noqa: F401


def _send(connection: socket.socket, message: "Message") -> None:
    """Exit if the parent has closed the socket."""
    from quire.engine.wire import pack

    try:
        connection.sendall(pack(message))
    except OSError:
        raise SystemExit(0) from None


def _build(start: "StartEngine", reporter: StartupReporter) -> "tuple[Engine, EngineInfo]":
    """Lazy imports: torch takes seconds, and the scripted engine does not need it."""
    from quire.engine.block_transport import LOCAL_TRANSPORT
    from quire.engine.open_model import open_model
    from quire.engine.prefix_transfer import EngineRole

    journal = None if start.journal is None else _journal(Path(start.journal), reporter)
    transport = LOCAL_TRANSPORT if start.role is EngineRole.WHOLE else _transport(start.transport)
    if start.script is not None:
        from quire.engine.scripted_engine import build_scripted

        return build_scripted(start.config, Path(start.script), reporter, journal, start.role, transport)
    with gc_frozen_imports():
        # The server has read the tokenizer; here, grammars alone need it.
        opened = open_model(start.config, reporter.fetching, found=preload_torch, reads_tokenizer=False)
        from quire.engine.build import build

    built = build(
        start.config,
        reporter,
        serving=start.serving,
        opened=opened,
        journal=journal,
        role=start.role,
        transport=transport,
    )
    return built.engine, built.info


def _journal(path: Path, reporter: StartupReporter) -> BinaryIO | None:
    """None if it cannot be written: an engine that is started again serves its clients all the same."""
    from quire.sched.journal.recorder import MAX_JOURNAL_BYTES, create_journal

    try:
        created = create_journal(path)
    except ConfigError as error:
        reporter.done("journal", f"none: {error.message}")
        return None
    limit = f"at most {MAX_JOURNAL_BYTES >> 20} MiB"
    reporter.done("journal", f"{created.path} · token ids of all prompts and answers, {limit}")
    return created.file


def _transport(chosen: "KvTransport") -> "BlockTransport":
    """Lazy: NIXL is an extra. By default it is used where it is there."""
    from quire.engine.block_transport import LOCAL_TRANSPORT, BlockTransport
    from quire.engine.prefix_transfer import KvTransport

    if chosen is KvTransport.MEMORY:
        return LOCAL_TRANSPORT
    try:
        from nixl_cu13._api import nixl_agent, nixl_agent_config

        agent = nixl_agent(f"quire-{os.urandom(8).hex()}", nixl_agent_config(False, backends=["UCX"]))
    except Exception as error:  # not installed, or not for this machine: NIXL's errors have no common class
        reason = f"{type(error).__name__}: {error}"[:300]
        if chosen is KvTransport.NIXL:
            raise ConfigError(
                f'--kv-transport nixl needs NIXL, which failed here ({reason}): pip install "quire[nixl]".',
                param="kv_transport",
            ) from error
        logging.getLogger(__name__).warning("KV blocks are copied on one machine only: no NIXL (%s)", reason)
        return LOCAL_TRANSPORT
    return BlockTransport(agent, local=chosen is KvTransport.AUTO)


def _publisher(config: "KvEventsConfig", engine: "Engine") -> "KvEventPublisher":
    """Lazy: ZMQ is an extra."""
    from quire.engine.kv_event_publisher import KvEventPublisher
    from quire.kv.block_events import BlockEventLog

    kv = engine.scheduler.kv
    if kv.tree is None:
        raise ConfigError(
            "--kv-events-config tells what the prefix cache stores, and prefix caching is off. Omit one of them.",
            param="kv_events",
        )
    publisher = KvEventPublisher(config, kv.block_size, time.time)
    kv.tree.events = BlockEventLog(kv.block_size)
    publisher.start()
    return publisher


def _read_start(connection: socket.socket) -> "StartEngine | None":
    from quire.engine.messages import StartEngine
    from quire.engine.wire import FrameDecoder, read_for_engine

    decoder = FrameDecoder()
    while data := connection.recv(1 << 16):
        for frame in decoder.feed(data):
            start = read_for_engine(frame)
            assert isinstance(start, StartEngine), start
            return start
    return None


if __name__ == "__main__":
    raise SystemExit(main(int(sys.argv[1]), int(sys.argv[2]), IMPORT_FIRST in sys.argv))
