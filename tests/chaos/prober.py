"""One client in its own process: how long a refusal takes while the server is overloaded.

The crowd's process is too busy to look at a clock when an answer comes; this one asks, waits, and asks again.
`python -m tests.chaos.prober PORT SECONDS` prints the seconds of every refusal, as JSON.
"""

import json
import socket
import sys
import time

from tests.server.many_clients import request
from tests.server.scripted_servers import completion_body

_PAUSE_S = 0.02


def probe(port: int, seconds: float) -> list[float]:
    sent = request(completion_body("endless", max_tokens=1))
    refusals_s: list[float] = []
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        began_s = time.monotonic()
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(sent)
            status = int(connection.recv(4096).split(b" ")[1])
            if status == 429:
                refusals_s.append(time.monotonic() - began_s)
        time.sleep(_PAUSE_S)
    return refusals_s


if __name__ == "__main__":
    print(json.dumps(probe(int(sys.argv[1]), float(sys.argv[2]))))
