"""`python -m quire.engine.rank_main FD FD FD PARENT`: one rank of a model that is divided, which follows rank 0.

The descriptors are inherited: the connection to rank 0, the one for heartbeats, and the place where the ranks find each
other. The process exits with rank 0's: PDEATHSIG on Linux, and closed sockets everywhere, which the heartbeats find
while a step is computed.
"""

import logging
import os
import socket
import sys
import time
from threading import Thread

from quire.core.errors import QuireError
from quire.core.process import die_with_parent, freeze_heap, gc_frozen_imports, leave_signals_to_parent
from quire.core.worker_process import receive_frame, send_frame
from quire.engine.rank_processes import HEARTBEAT_S, read_start


def main(connection_fd: int, heartbeat_fd: int, rendezvous: int, parent: int) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s rank %(levelname)s %(message)s", stream=sys.stderr)
    leave_signals_to_parent()
    if not die_with_parent(parent):
        return 0
    leader = socket.socket(fileno=connection_fd)
    Thread(target=_send_heartbeats, args=(socket.socket(fileno=heartbeat_fd),), daemon=True).start()
    start = receive_frame(leader)
    if start is None:
        return 0
    with gc_frozen_imports():  # torch takes seconds: heartbeats are sent meanwhile
        from quire.engine.build_ranks import build_rank

    try:
        follow = build_rank(read_start(start), leader, rendezvous)
    except QuireError as error:
        send_frame(leader, {"error": error.message})
        return error.exit_code
    if follow is None:
        return 0
    freeze_heap()
    follow()
    return 0


def _send_heartbeats(connection: socket.socket) -> None:
    """Ends the process when rank 0 has ended, whatever the main thread waits for."""
    connection.setblocking(False)
    while True:
        try:
            connection.send(b".")
        except BlockingIOError:  # rank 0 is stopped
            pass
        except OSError:
            os._exit(0)
        time.sleep(HEARTBEAT_S)


if __name__ == "__main__":
    raise SystemExit(main(*map(int, sys.argv[1:5])))
