"""Files of many owners, uploaded at once: on disk there is never more than an owner may have, and nobody else pays."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.errors import QuireError
from quire.server import file_store
from quire.server.file_store import FilesFull, FileStore, FileWriter

LIMIT = 100
OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "write", "write", "write", "keep", "drop", "delete"]),
        st.sampled_from(["one", "two"]),
        st.integers(0, 60),
    ),
    max_size=60,
)


@given(operations=OPERATIONS)
def test_uploads_at_once_and_files_never_exceed_what_their_owner_may_have(
    operations: list[tuple[str, str, int]],
) -> None:
    with TemporaryDirectory() as folder:
        store = FileStore(Path(folder), LIMIT, lambda: 0.0)
        open_: dict[str, list[FileWriter]] = {"one": [], "two": []}
        for what, owner, size in operations:
            uploads, files = open_[owner], list(store.owned(owner))
            held = sum(file.bytes for file in files) + sum(upload.num_bytes for upload in uploads)
            if what == "begin" and len(uploads) < file_store.MAX_UPLOADS:
                uploads.append(store.begin(owner, owner))
            elif what == "write" and uploads:
                upload = uploads[size % len(uploads)]
                try:
                    upload.write(b"x" * size)
                    assert held + size <= LIMIT
                except FilesFull:
                    assert held + size > LIMIT, "refused, and there was room"
                    uploads.remove(upload)
                    store.end(upload)
            elif what == "keep" and uploads:
                upload = uploads.pop()
                upload.close()
                store.add(upload.path, owner, "name", "batch")
                store.end(upload)
            elif what == "drop" and uploads:
                store.end(uploads.pop())
            elif what == "delete" and files:
                store.delete(files[size % len(files)])
            for each in ("one", "two"):
                total = sum(file.bytes for file in store.owned(each))
                assert total + sum(upload.num_bytes for upload in open_[each]) <= LIMIT
        for upload in (*open_["one"], *open_["two"]):
            store.end(upload)
        assert not list(Path(folder).glob("files/*.part"))
        store.close()


def test_uploads_count_as_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_store, "MAX_FILES", 2)
    store = FileStore(tmp_path, LIMIT, lambda: 0.0)
    first, second = store.begin("one", "one"), store.begin("one", "another address")
    with pytest.raises(FilesFull, match="has 2 files"):
        store.begin("one", "a third")
    other = store.begin("two", "two")
    for upload in (first, second, other):
        store.end(upload)
    store.end(store.begin("one", "one"))
    store.close()


def test_a_refused_upload_takes_no_place(tmp_path: Path) -> None:
    """Whatever refuses it: as many as before may be sent once there is room."""
    store = FileStore(tmp_path, LIMIT, lambda: 0.0)
    store.note_growth("one", LIMIT + 1)
    for _ in range(2 * file_store.MAX_UPLOADS):
        with pytest.raises(QuireError, match="--files-limit"):
            store.begin("one", "one")
    store.note_growth("one", -LIMIT - 1)
    uploads = [store.begin("one", "one") for _ in range(file_store.MAX_UPLOADS)]
    with pytest.raises(FilesFull, match=f"{file_store.MAX_UPLOADS} files of this client are being uploaded"):
        store.begin("one", "one")
    for upload in uploads:
        store.end(upload)
    store.close()


def test_uploads_at_once_share_what_their_owner_may_have(tmp_path: Path) -> None:
    store = FileStore(tmp_path, LIMIT, lambda: 0.0)
    first, second, other = store.begin("one", "one"), store.begin("one", "one"), store.begin("two", "two")
    first.write(b"x" * 60)
    other.write(b"x" * 100)
    with pytest.raises(FilesFull, match="--files-limit"):
        second.write(b"x" * 60)
    store.end(second)
    first.write(b"x" * 40)
    for upload in (first, other):
        store.end(upload)
    store.close()
