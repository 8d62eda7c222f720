"""Batches of requests as OpenAI has them: their states, on disk, so that a restarted server goes on with them.

A batch belongs to the key that made it. `server/batch/service.py` runs them. Does not depend on HTTP.
"""

import asyncio
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from quire.core.errors import InvalidParameter, QuireError, shown
from quire.server.file_store import FileStore, StoredFile, write_whole

MAX_OPEN_BATCHES = 50  # of one owner, that have not ended
MAX_BATCHES = 1000  # of one owner; of those that have ended, the oldest are forgotten
_ID = re.compile(r"batch_[0-9a-f]{32}")
_WINDOW = re.compile(r"([1-9]\d{0,2})h")
_MAX_HOURS = 168
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512  # OpenAI's limits
ENDED = frozenset({"completed", "failed", "expired", "cancelled"})


class BatchNotFound(QuireError):
    """No batch of this key has that id."""

    status = 404
    code = "batch_not_found"

    def __init__(self) -> None:
        super().__init__("This client has no batch with that id; GET /v1/batches lists its batches.", param="batch_id")


class TooManyBatches(QuireError):
    """A key has as many batches that have not ended as it may have."""

    status = 429
    code = "too_many_batches"
    retry_after_s = 60.0


class BatchError(msgspec.Struct, frozen=True):
    """Why a batch was not begun: one line of its file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class RequestCounts(msgspec.Struct):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class StoredBatch(msgspec.Struct, kw_only=True):
    """The state of a batch. Times are seconds since 1970."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    status: str = "validating"
    metadata: dict[str, str] | None = None
    errors: list[BatchError] = []
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    outcome: str | None = None  # while it is being finalized: the status that follows

    @property
    def has_ended(self) -> bool:
        return self.status in ENDED

    def public(self) -> dict[str, object]:
        """As OpenAI shows it."""
        shown_as = {name: value for name, value in msgspec.structs.asdict(self).items() if name not in _PRIVATE}
        problems = [msgspec.structs.asdict(problem) for problem in self.errors]
        shown_as["errors"] = {"object": "list", "data": problems} if problems else None
        ended = self.has_ended
        shown_as["output_file_id"] = self.output_file_id if ended else None
        shown_as["error_file_id"] = self.error_file_id if ended else None
        return {"object": "batch", **shown_as, "request_counts": msgspec.structs.asdict(self.counts)}


_PRIVATE = ("owner", "counts", "outcome")


class BatchStore:
    """The batches of a folder."""

    def __init__(self, files: FileStore, clock: Callable[[], float]) -> None:
        self.files = files
        self._folder = files.folder / "batches"
        self._folder.mkdir(exist_ok=True)
        self.clock = clock
        self._batches: dict[str, StoredBatch] = {}
        self.changed = asyncio.Event()  # a batch was added or is to be cancelled
        for path in sorted(self._folder.glob("*.json")):
            if _ID.fullmatch(path.stem):
                try:
                    self._batches[path.stem] = msgspec.json.decode(path.read_bytes(), type=StoredBatch)
                except (msgspec.DecodeError, OSError):
                    continue

    @property
    def open(self) -> list[StoredBatch]:
        """Those that have not ended, the oldest first."""
        found = [batch for batch in self._batches.values() if not batch.has_ended]
        return sorted(found, key=lambda batch: (batch.created_at, batch.id))

    def owned(self, owner: str) -> Iterator[StoredBatch]:
        """The newest first."""
        found = [batch for batch in self._batches.values() if batch.owner == owner]
        return iter(sorted(found, key=lambda batch: (batch.created_at, batch.id), reverse=True))

    def find(self, owner: str, batch_id: str) -> StoredBatch:
        batch = self._batches.get(batch_id)
        if batch is None or batch.owner != owner:
            raise BatchNotFound
        return batch

    def create(
        self, owner: str, input_file: StoredFile, endpoint: str, window: str, metadata: dict[str, str] | None
    ) -> StoredBatch:
        found = _WINDOW.fullmatch(window)
        if found is None or int(found[1]) > _MAX_HOURS:
            raise InvalidParameter(
                f"completion_window is {shown(window)}; it may be 24h, or another number of hours up to {_MAX_HOURS}.",
                param="completion_window",
            )
        _check_metadata(metadata or {})
        mine = list(self.owned(owner))
        if sum(not batch.has_ended for batch in mine) >= MAX_OPEN_BATCHES:
            raise TooManyBatches(f"{MAX_OPEN_BATCHES} batches of this client have not ended, the limit; wait for one.")
        self.files.check_room(owner)  # its results become files
        for old in [batch for batch in mine if batch.has_ended][MAX_BATCHES - 1 :]:
            del self._batches[old.id]
            self._path(old, ".json").unlink(missing_ok=True)
        now_s = int(self.clock())
        batch = StoredBatch(
            id=f"batch_{secrets.token_hex(16)}",
            owner=owner,
            endpoint=endpoint,
            input_file_id=input_file.id,
            completion_window=window,
            created_at=now_s,
            expires_at=now_s + 3600 * int(found[1]),
            metadata=metadata,
        )
        self._batches[batch.id] = batch
        self.save(batch)
        self.changed.set()
        return batch

    def cancel(self, batch: StoredBatch) -> None:
        """To be cancelled by what runs it. One that has ended stays as it is."""
        if not batch.has_ended and batch.status not in ("cancelling", "finalizing"):
            batch.status, batch.cancelling_at = "cancelling", int(self.clock())
            self.save(batch)
            self.changed.set()

    def save(self, batch: StoredBatch) -> None:
        write_whole(self._path(batch, ".json"), msgspec.json.encode(batch))

    def output_path(self, batch: StoredBatch, kind: str) -> Path:
        """Results while the batch runs: "output" or "errors"."""
        return self._path(batch, f".{kind}")

    def _path(self, batch: StoredBatch, suffix: str) -> Path:
        assert _ID.fullmatch(batch.id), batch.id
        return self._folder / f"{batch.id}{suffix}"


def _check_metadata(metadata: dict[str, str]) -> None:
    too_long = any(len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in metadata.items())
    if len(metadata) > _MAX_METADATA or too_long:
        raise InvalidParameter(
            f"metadata may have {_MAX_METADATA} entries, of {_MAX_KEY} characters and values of {_MAX_VALUE}.",
            param="metadata",
        )
