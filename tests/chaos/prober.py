"""One client in its own process: how long a refusal and `/health` take while the server is overloaded.

The crowd's process is too busy to look at a clock when an answer comes; this one asks, waits, and asks again.
`python -m tests.chaos.prober PORT SECONDS` prints the seconds of every refusal and of every `/health`, as JSON.
"""

import json
import socket
import sys
import time

from tests.server.many_clients import request
from tests.server.scripted_servers import completion_body

_PAUSE_S = 0.02


_COMPLETION = request(completion_body("endless", max_tokens=1))
_HEALTH = b"GET /health HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"


def probe(port: int, seconds: float) -> dict[str, list[float]]:
    taken_s: dict[str, list[float]] = {"refusal": [], "health": []}
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        for name, sent, expected in (("refusal", _COMPLETION, 429), ("health", _HEALTH, 200)):
            began_s = time.monotonic()
            with socket.create_connection(("127.0.0.1", port)) as connection:
                connection.sendall(sent)
                status = int(connection.recv(4096).split(b" ")[1])
                if status == expected:
                    taken_s[name].append(time.monotonic() - began_s)
            time.sleep(_PAUSE_S)
    return taken_s


if __name__ == "__main__":
    print(json.dumps(probe(int(sys.argv[1]), float(sys.argv[2]))))
