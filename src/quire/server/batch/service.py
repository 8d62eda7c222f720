"""Runs the batches of `batch_store.py` through the application, at the lowest priority, and goes on with them after a
restart.

Results are written as they come, answers to one file and all else to another; both become files of the batch's owner
when it ends. After a restart, requests with an answer are skipped and the others run again. Owners take turns.
"""

import asyncio
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.core.errors import QuireError
from quire.server.batch.lines import FinishedLines, InvalidLine, custom_id_of, error_line, read_line
from quire.server.batch.runner import BatchCounts, BatchRunner
from quire.server.batch_store import BatchError, BatchStore, RequestCounts, StoredBatch
from quire.server.file_store import FilesFull, FileStore, new_file_id
from quire.server.grammar_precompiler import FairSlots
from quire.server.http.auth import ANONYMOUS, Identity
from quire.server.http.request_context import RequestContext, new_request_id, set_context

MAX_REQUESTS = 50_000  # of one batch: OpenAI's limit
_MAX_LINES = 2 * MAX_REQUESTS  # with blank ones: a file may have half a billion of them
_MAX_ID = 512  # characters of a custom_id: those of all requests are held in memory
_BATCHES_AT_ONCE = 2
_CONCURRENCY = 16  # requests of one batch: enough to fill what others leave of a step
_MAX_PROBLEMS = 100  # that are reported of an invalid file
_MAX_TRIES = (
    100_000  # of a request, while the server is busy or a model is loaded: the window of its batch is the limit
)
_PRIORITY = (b"x-quire-priority", b"100")  # the lowest
_SAVE_S = 1.0  # counts on disk are this old at most
_PURPOSE = "batch_output"

_log = logging.getLogger(__name__)


class OwnerApp:
    """ASGI: the application, for requests of one owner that need no key."""

    def __init__(self, app: ASGIApp, identity: Identity) -> None:
        self._app = app
        self._identity = identity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = [*scope["headers"], _PRIORITY]
        set_context(scope, RequestContext(new_request_id(), time.monotonic(), passed=True, identity=self._identity))
        await self._app(scope, receive, send)


def identity_of(owner: str, weights: Mapping[str, float]) -> Identity:
    """Trusted with a priority, which is the lowest; the share of the engine is that of the key."""
    return Identity(owner, weights.get(owner, 1.0), trusted=True) if owner else ANONYMOUS


class BatchService:
    """Runs batches until it is cancelled."""

    def __init__(self, store: BatchStore, app: ASGIApp, weights: Mapping[str, float], max_line_bytes: int) -> None:
        self._store = store
        self._app = app
        self._weights = weights
        self._max_line_bytes = max_line_bytes
        self._slots = FairSlots(_BATCHES_AT_ONCE)
        self._running: dict[str, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Ends only when it is cancelled; then batches go on with the next server."""
        try:
            while True:
                for batch in self._store.open:
                    task = self._running.get(batch.id)
                    if task is None:
                        self._running[batch.id] = asyncio.create_task(self._run(batch))
                    elif batch.status == "cancelling":
                        task.cancel()
                self._store.changed.clear()
                await self._store.changed.wait()
        finally:
            tasks = list(self._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._store.files.close()

    async def _run(self, batch: StoredBatch) -> None:
        """One batch from where it is to its end. A cancellation by its owner ends it, one by the server does not."""
        try:
            await self._slots.acquire(batch.owner)
            try:
                await self._work(batch)
            finally:
                self._slots.release(batch.owner)
        except asyncio.CancelledError:
            if batch.status != "cancelling":
                raise
            self._finalize(batch, "cancelled")
        except Exception as error:
            _log.exception("a batch failed")
            message = error.message if isinstance(error, QuireError) else "The server failed; see its log."
            batch.errors = [BatchError("batch_failed", message)]
            self._end(batch, "failed")
        finally:
            self._running.pop(batch.id, None)

    async def _work(self, batch: StoredBatch) -> None:
        if batch.status == "cancelling":
            self._finalize(batch, "cancelled")
            return
        if batch.status == "finalizing":
            self._finalize(batch, batch.outcome or "completed")
            return
        source = self._store.files.path_of(self._store.files.find(batch.owner, batch.input_file_id))
        if batch.status == "validating":
            num_requests, problems = await asyncio.to_thread(self._validate, batch, source)
            if problems:
                batch.errors = problems
                self._end(batch, "failed")
                return
            batch.status, batch.in_progress_at = "in_progress", self._now
            batch.counts.total = num_requests
            self._store.save(batch)
        try:
            async with asyncio.timeout(batch.expires_at - self._store.clock()):
                await self._answer(batch, source)
        except TimeoutError:
            await asyncio.to_thread(self._write_expired, batch, source)
            self._finalize(batch, "expired")
        except FilesFull as full:  # it keeps the results that its owner has room for
            batch.errors = [BatchError(full.code, full.message)]
            self._finalize(batch, "failed")
        else:
            self._finalize(batch, "completed")

    def _validate(self, batch: StoredBatch, source: Path) -> tuple[int, list[BatchError]]:
        """The number of requests, and what is wrong with the file. On a thread."""
        problems: list[BatchError] = []
        seen: set[str] = set()
        num_requests = 0
        with source.open("rb") as lines:
            for number, text in enumerate(self._lines(lines), 1):
                if number > _MAX_LINES:
                    words = f"The file has more than {_MAX_LINES} lines, the limit; leave out blank ones."
                    problems.append(BatchError("too_many_lines", words))
                    break
                is_long = len(text) > self._max_line_bytes  # also a blank one, which would be read as a whole later
                is_request = is_long or bool(text.strip())
                num_requests += is_request
                if num_requests > MAX_REQUESTS:
                    words = f"The file has more than {MAX_REQUESTS} requests, the limit of a batch."
                    problems.append(BatchError("too_many_requests", words))
                    break
                if not is_request or len(problems) >= _MAX_PROBLEMS:
                    continue
                if is_long:
                    words = f"Line {number} has more than {self._max_line_bytes} bytes, the limit (--max-body)."
                    problems.append(BatchError("line_too_long", words, number))
                    continue
                try:
                    request = read_line(number, text, (batch.endpoint,))
                except InvalidLine as invalid:
                    problems.append(BatchError(invalid.code, invalid.message, number))
                    continue
                if len(request.custom_id) > _MAX_ID:
                    words = (
                        f"Line {number} has a custom_id of {len(request.custom_id)} characters; the limit is {_MAX_ID}."
                    )
                    problems.append(BatchError("custom_id_too_long", words, number, "custom_id"))
                    continue
                if request.custom_id in seen:
                    words = f"Line {number} has the custom_id of an earlier line; each needs its own."
                    problems.append(BatchError("duplicate_custom_id", words, number, "custom_id"))
                seen.add(request.custom_id)
        if not num_requests and not problems:
            problems.append(BatchError("empty_file", "The file has no requests; write one per line."))
        return num_requests, problems

    def _lines(self, lines: IO[bytes]) -> Iterator[bytes]:
        """Lines. Of one that is too long, so much that this can be seen; the rest is skipped."""
        most = self._max_line_bytes + 1
        while text := lines.readline(most):
            yield text
            while len(text) == most and not text.endswith(b"\n"):
                text = lines.readline(most)

    async def _answer(self, batch: StoredBatch, source: Path) -> None:
        files = self._store.files
        finished = await asyncio.to_thread(_read_finished, self._store.output_path(batch, "output"))
        self._store.output_path(batch, "errors").unlink(missing_ok=True)  # they run again
        app = OwnerApp(self._app, identity_of(batch.owner, self._weights))
        saved_s = self._store.clock()

        def report(counts: BatchCounts) -> None:
            nonlocal saved_s
            num_failed = counts.num_refused + counts.num_unreadable
            batch.counts = RequestCounts(batch.counts.total, counts.num_answered + counts.num_skipped, num_failed)
            if self._store.clock() - saved_s >= _SAVE_S:
                saved_s = self._store.clock()
                self._store.save(batch)

        with (
            source.open("rb") as lines,
            self._store.output_path(batch, "output").open("ab", buffering=0) as answers,
            self._store.output_path(batch, "errors").open("ab", buffering=0) as errors,
        ):
            num_written = answers.tell()  # of an earlier run
            files.note_growth(batch.owner, num_written)

            def write(line: bytes, answered: bool) -> None:
                nonlocal num_written
                files.check_bytes(batch.owner, len(line))
                files.note_growth(batch.owner, len(line))
                num_written += len(line)
                (answers if answered else errors).write(line)

            try:
                await BatchRunner(app, lines, finished, write, report, max_tries=_MAX_TRIES).run(_CONCURRENCY)
            except ExceptionGroup as errors_of_workers:
                raise _first_leaf(errors_of_workers) from errors_of_workers
            finally:
                files.note_growth(batch.owner, -num_written)

    def _write_expired(self, batch: StoredBatch, source: Path) -> None:
        """Error lines of the requests that were not answered in time. On a thread."""
        finished = _read_finished(self._store.output_path(batch, "output"))
        refused = _read_ids(self._store.output_path(batch, "errors"))
        with source.open("rb") as lines, self._store.output_path(batch, "errors").open("ab") as errors:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    request = read_line(number, text, (batch.endpoint,))
                    if request not in finished and request.custom_id not in refused:
                        words = "This request was not executed within the completion window."
                        late = InvalidLine(words, request.custom_id)
                        late.code = "batch_expired"
                        errors.write(error_line(number, late))
                        batch.counts.failed += 1

    def _finalize(self, batch: StoredBatch, outcome: str) -> None:
        """Its results become files. May be repeated, if the server ends in between."""
        if batch.finalizing_at is None:
            batch.output_file_id, batch.error_file_id = new_file_id(), new_file_id()
            batch.outcome, batch.finalizing_at = outcome, self._now
            if outcome != "cancelled":
                batch.status = "finalizing"
            self._store.save(batch)
        assert batch.output_file_id is not None and batch.error_file_id is not None
        files = self._store.files
        if not self._keep(files, batch, "output", batch.output_file_id):
            batch.output_file_id = None
        if not self._keep(files, batch, "errors", batch.error_file_id):
            batch.error_file_id = None
        self._end(batch, outcome)

    def _keep(self, files: FileStore, batch: StoredBatch, kind: str, file_id: str) -> bool:
        """Whether there are results of this kind."""
        path = self._store.output_path(batch, kind)
        if path.exists() and path.stat().st_size:
            files.add(path, batch.owner, f"{batch.id}_{kind}.jsonl", _PURPOSE, file_id=file_id)
            return True
        path.unlink(missing_ok=True)
        with suppress(QuireError):  # it was kept before the server ended
            return files.find(batch.owner, file_id) is not None
        return False

    def _end(self, batch: StoredBatch, status: str) -> None:
        batch.status = status
        setattr(batch, f"{status}_at", self._now)
        self._store.save(batch)

    @property
    def _now(self) -> int:
        return int(self._store.clock())


def _first_leaf(group: ExceptionGroup[Exception]) -> Exception:
    """The first error of a group that is not a group itself."""
    first = group.exceptions[0]
    return _first_leaf(first) if isinstance(first, ExceptionGroup) else first


def _read_finished(path: Path) -> FinishedLines:
    """The requests with an answer. A line that was cut off is removed."""
    finished = FinishedLines()
    if path.exists():
        size = 0
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                finished.add(line)
                size += len(line)
        os.truncate(path, size)
    return finished


def _read_ids(path: Path) -> set[str | None]:
    """The requests with an error."""
    if not path.exists():
        return set()
    with path.open("rb") as lines:
        return {custom_id_of(line) for line in lines if line.endswith(b"\n")}
