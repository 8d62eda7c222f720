"""Who listens on a port, as far as Linux tells: for whoever wanted it. Knows nothing of servers."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")
_LISTENING = "0A"
_ADDRESS, _STATE, _INODE = 1, 3, 9  # columns


def port_owner(port: int) -> str | None:
    """Such as "pid 4711 (quire)". None if nobody listens, if it is another user's, or elsewhere than on Linux."""
    wanted = {f"socket:[{inode}]" for inode in _listening(port)}
    if not wanted:
        return None
    for folder in _PROC.glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is not ours to look at
            for file in (folder / "fd").iterdir():
                if os.readlink(file) in wanted:
                    name = (folder / "comm").read_text(errors="replace").strip()
                    return f"pid {folder.name} ({name})"
    return None


def _listening(port: int) -> Iterator[str]:
    """The inodes of the sockets."""
    for table in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                words = line.split()
                if words[_STATE] == _LISTENING and int(words[_ADDRESS].rpartition(":")[2], 16) == port:
                    yield words[_INODE]
