"""A model small enough to build in a test, and a real wheel to carry it."""

import base64
import hashlib
import zipfile
from pathlib import Path

from quire.catalog.names import WheelModel

CONTENT = b"GGUF" + bytes(range(256)) * 12_000  # three chunks of the store, so that a copy can be interrupted

TINY = WheelModel(
    name="tiny",
    aliases=(),
    requirement="quire-tiny-model==1.0",
    member="quire_tiny_model/tiny.gguf",
    file_name="tiny.gguf",
    size_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="Apache-2.0",
)


def build_wheel(folder: Path, sequences: dict[str, bytes]) -> Path:
    """A wheel as pip wants it, with its metadata and its record."""
    info = "quire_tiny_model-1.0.dist-info"
    files = {
        **sequences,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: quire-tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    rows = [f"{name},sha256={_record_sum(data)},{len(data)}\n" for name, data in files.items()]
    path = folder / "quire_tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
        archive.writestr(f"{info}/RECORD", "".join(rows) + f"{info}/RECORD,,\n")
    return path


def _record_sum(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
