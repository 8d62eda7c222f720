"""Uploaded files and the outputs of batches, on disk: bounded by file, and in number and bytes by owner.

A file is two files of the folder, its data and its description, both named by its id. Ids are made here, and a client's
id is looked up in memory: it is never part of a path. A file belongs to the key that made it; for others it does not
exist. Used on the event loop's thread, but for the data. Does not depend on HTTP.
"""

import fcntl
import os
import re
import secrets
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

import msgspec

from quire.core.errors import ConfigError, QuireError

MAX_FILE_BYTES = 512 << 20
MAX_FILES = 1000  # of one owner
MAX_UPLOADS = 4  # at once, of one client
_ID = re.compile(r"file-[0-9a-f]{32}")
_DATA, _DESCRIPTION, _PART = ".data", ".json", ".part"


class FileNotFound(QuireError):
    """No file of this key has that id."""

    status = 404
    code = "file_not_found"

    def __init__(self) -> None:
        super().__init__("This client has no file with that id; GET /v1/files lists its files.", param="file_id")


class FilesFull(QuireError):
    """A key has as many files, or as many bytes in them, as it may have."""

    status = 429
    code = "files_full"


class FileTooLarge(QuireError):
    """More bytes than one file may have."""

    status = 413
    code = "file_too_large"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The description of a file."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int  # seconds since 1970
    expires_at: int | None = None

    def public(self) -> dict[str, object]:
        """As OpenAI shows it."""
        shown: dict[str, object] = {"id": self.id, "object": "file", "bytes": self.bytes, "created_at": self.created_at}
        shown |= {"filename": self.filename, "purpose": self.purpose, "status": "processed", "status_details": None}
        return shown if self.expires_at is None else {**shown, "expires_at": self.expires_at}


class FileWriter:
    """A file that is being written. `FileStore.finish` it, or `discard` it."""

    def __init__(self, store: "FileStore", owner: str, client: str, path: Path) -> None:
        self._store = store
        self.owner = owner
        self.client = client
        self.path = path
        self.num_bytes = 0
        self._file: IO[bytes] = path.open("xb")

    def write(self, data: bytes) -> None:
        """On any thread. Raises a `QuireError` beyond a limit."""
        self.num_bytes += len(data)
        if self.num_bytes > MAX_FILE_BYTES:
            raise FileTooLarge(f"The file has more than {MAX_FILE_BYTES} bytes, the limit of one file.")
        self._store.check_bytes(self.owner, 0)
        try:
            self._file.write(data)
        except OSError as error:
            raise FilesFull(f"The file cannot be written: {error.strerror}.") from error

    def close(self) -> None:
        self._file.close()

    def discard(self) -> None:
        self._file.close()
        self.path.unlink(missing_ok=True)


class FileStore:
    """The files of a folder. One server uses it at a time."""

    def __init__(self, folder: Path, max_bytes_per_owner: int, clock: Callable[[], float]) -> None:
        self.folder = folder
        self._max_bytes = max_bytes_per_owner
        self._clock = clock
        self._files: dict[str, StoredFile] = {}
        self._uploads: dict[FileWriter, None] = {}  # that are being written
        self._growing: Counter[str] = Counter()  # bytes of results of batches that run, by owner
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # what clients upload is theirs
            (folder / "files").mkdir(exist_ok=True)
            self._lock = (folder / "lock").open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--files-dir {folder} is in use by another server; give each its own.") from error
        except OSError as error:
            raise ConfigError(f"--files-dir {folder} cannot be used: {error.strerror}.", param="files_dir") from error
        self._read()

    def _read(self) -> None:
        """What an earlier server has left. Uploads that were cut off are removed."""
        for path in (self.folder / "files").iterdir():
            data = path.with_suffix(_DATA)
            if path.suffix == _DESCRIPTION and _ID.fullmatch(path.stem) and data.is_file():
                try:
                    stored = msgspec.json.decode(path.read_bytes(), type=StoredFile)
                except (msgspec.DecodeError, OSError):
                    continue
                self._files[path.stem] = stored
            elif path.suffix == _PART:
                path.unlink()

    def close(self) -> None:
        self._lock.close()

    # Files of one owner

    def owned(self, owner: str) -> Iterator[StoredFile]:
        """The newest first. Expired ones are removed."""
        self.expire()
        found = [stored for stored in self._files.values() if stored.owner == owner]
        return iter(sorted(found, key=lambda stored: (stored.created_at, stored.id), reverse=True))

    def find(self, owner: str, file_id: str) -> StoredFile:
        self.expire()
        stored = self._files.get(file_id)
        if stored is None or stored.owner != owner:
            raise FileNotFound
        return stored

    def path_of(self, stored: StoredFile) -> Path:
        return self._path(stored.id, _DATA)

    def delete(self, stored: StoredFile) -> None:
        del self._files[stored.id]
        self._path(stored.id, _DESCRIPTION).unlink(missing_ok=True)
        self._path(stored.id, _DATA).unlink(missing_ok=True)

    def expire(self) -> None:
        now_s = self._clock()
        for stored in list(self._files.values()):
            if stored.expires_at is not None and stored.expires_at <= now_s:
                self.delete(stored)

    # New ones

    def begin(self, owner: str, client: str) -> FileWriter:
        """A file to be uploaded. `client`: who sends it; without keys all have one owner and many addresses."""
        if sum(upload.client == client for upload in self._uploads) >= MAX_UPLOADS:
            raise FilesFull(f"{MAX_UPLOADS} files of this client are being uploaded, the limit; wait for one to end.")
        self.check_room(owner)
        writer = FileWriter(self, owner, client, self.folder / "files" / f"{new_file_id()}{_PART}")
        self._uploads[writer] = None
        return writer

    def end(self, writer: FileWriter) -> None:
        """However an upload ended."""
        del self._uploads[writer]
        writer.discard()

    def check_room(self, owner: str) -> None:
        """Whether an owner may have one more file. Raises `FilesFull`."""
        num_files = sum(stored.owner == owner for stored in self._files.values())
        if num_files + sum(upload.owner == owner for upload in self._uploads) >= MAX_FILES:
            raise FilesFull(f"This client has {MAX_FILES} files, the limit; delete some.")
        self.check_bytes(owner, 0)

    def note_growth(self, owner: str, num_bytes: int) -> None:
        """A batch that runs has more bytes of results; fewer, if they are files now or were dropped."""
        self._growing[owner] += num_bytes
        if not self._growing[owner]:
            del self._growing[owner]

    def check_bytes(self, owner: str, num_new: int) -> None:
        """Whether an owner may have this many more bytes, beside its files and those that are being written. On any
        thread. Raises `FilesFull`."""
        held = sum(stored.bytes for stored in list(self._files.values()) if stored.owner == owner)
        held += sum(upload.num_bytes for upload in list(self._uploads) if upload.owner == owner)
        held += self._growing[owner]
        if held + num_new > self._max_bytes:
            raise FilesFull(
                f"With this one, the files of this client have more than {self._max_bytes} bytes (--files-limit); "
                f"delete some."
            )

    def add(
        self,
        data: Path,
        owner: str,
        filename: str,
        purpose: str,
        *,
        expires_in_s: int | None = None,
        file_id: str | None = None,
    ) -> StoredFile:
        """Take a complete file into the store, which moves it."""
        now_s = int(self._clock())
        stored = StoredFile(
            id=file_id or new_file_id(),
            owner=owner,
            filename=filename,
            purpose=purpose,
            bytes=data.stat().st_size,
            created_at=now_s,
            expires_at=None if expires_in_s is None else now_s + expires_in_s,
        )
        os.replace(data, self._path(stored.id, _DATA))
        write_whole(self._path(stored.id, _DESCRIPTION), msgspec.json.encode(stored))
        self._files[stored.id] = stored
        return stored

    def _path(self, file_id: str, suffix: str) -> Path:
        assert _ID.fullmatch(file_id), file_id
        return self.folder / "files" / f"{file_id}{suffix}"


def new_file_id() -> str:
    return f"file-{secrets.token_hex(16)}"


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by one that is complete."""
    other = path.with_suffix(_PART)
    other.write_bytes(data)
    os.replace(other, path)
