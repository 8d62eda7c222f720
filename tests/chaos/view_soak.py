"""The page /engine left open while 256 rows run: what the server and the page hold, minute by minute.

`python -m tests.chaos.view_soak MINUTES` keeps 256 scripted requests of many lengths running, with the page open in
Chromium where there is one; without, its stream is read. Each line of the table is one
minute: anonymous memory of the front process and of the engine, and of the page the JavaScript heap after a garbage
collection, the nodes of its document and the steps it has seen. The exit status is 1 if the second half grew.
"""

import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.browser.chromium import PROGRAM, Tab, chromium
from tests.chaos.soak import anonymous_kib
from tests.server.many_clients import RawClient, fetch, request
from tests.server.scripted_servers import completion_body, scripted
from tests.server.server_process import Running

NUM_ROWS = 256
STEP_MS = 100
WATCH = b"GET /engine/events HTTP/1.1\r\nHost: localhost\r\n\r\n"
MAX_GROWTH = 0.05  # of the second half, per process
COLUMNS = "minute  requests  front KiB  engine KiB  heap KiB  nodes    step"


class ViewHeld(NamedTuple):
    """What the server and the page hold."""

    front_kib: int
    engine_kib: int
    heap_kib: int
    num_nodes: int


async def one_row(port: int, chance: random.Random, ended: list[int]) -> None:
    """One request after another. Half of the prompts share a beginning, so the prefix tree changes."""
    while True:
        shared = "endless " * chance.choice((20, 60)) if chance.random() < 0.5 else f"{chance.random()} endless "
        body = completion_body(f"{shared} {chance.randrange(100)}", max_tokens=chance.randrange(20, 400))
        response = await fetch(port, request(body))
        assert response.status == 200 and response.complete, response.body[-500:]
        ended.append(len(response.body))


class WatchedPage:
    """The page in a browser; without one, its stream."""

    def __init__(self, tab: Tab | None, port: int) -> None:
        self._tab = tab
        self._port = port

    async def held(self) -> tuple[int, int]:
        """Heap in KiB and nodes."""
        return (0, 0) if self._tab is None else await asyncio.to_thread(self._tab.held)

    async def read(self) -> None:
        if self._tab is None:
            stream = await RawClient.connect(self._port, WATCH)
            while True:
                before = len(stream.received)
                await stream.receive_some()
                assert len(stream.received) > before, "the stream ended"
                stream.received.clear()

    def step(self) -> str:
        shown = "document.getElementById('time-text').innerText.split(' ')[3]"
        return "–" if self._tab is None else str(self._tab.run(shown)).rstrip(",;")


async def watch(server: Running, page: WatchedPage, minutes: int) -> list[ViewHeld]:
    ended: list[int] = []
    tasks = [asyncio.create_task(one_row(server.port, random.Random(row), ended)) for row in range(NUM_ROWS)]
    tasks.append(asyncio.create_task(page.read()))
    held: list[ViewHeld] = []
    print(COLUMNS, flush=True)
    began_s = time.monotonic()
    for minute in range(1, minutes + 1):
        await asyncio.sleep(began_s + 60 * minute - time.monotonic())
        for task in tasks:
            if task.done():
                task.result()  # a wrong answer
        heap_kib, num_nodes = await page.held()
        now = ViewHeld(server.resident_bytes >> 10, anonymous_kib(server.engine_pid), heap_kib, num_nodes)
        step = await asyncio.to_thread(page.step)
        held.append(now)
        row = f"{minute:6} {len(ended):9} {now.front_kib:10} {now.engine_kib:11} {now.heap_kib:9} {now.num_nodes:6}"
        print(f"{row} {step:>7}", flush=True)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return held


@contextlib.contextmanager
def open_page(server: Running, folder: Path) -> Iterator[WatchedPage]:
    if PROGRAM is None:
        yield WatchedPage(None, server.port)
        return
    with chromium(folder / "profile") as browser:
        tab = browser.tab(server.url + "/engine")
        tab.until("document.getElementById('map-text').innerText.includes('blocks held')")
        yield WatchedPage(tab, server.port)


def main(minutes: int) -> int:
    starts = ("--max-num-seqs", str(NUM_ROWS), "--max-waiting", str(NUM_ROWS))
    with (
        tempfile.TemporaryDirectory() as name,
        scripted(Path(name), *starts, step_ms=STEP_MS) as server,
        open_page(server, Path(name)) as page,
    ):
        held = asyncio.run(watch(server, page, minutes))
    middle, end = held[len(held) // 2], held[-1]
    growth = {field: getattr(end, field) / max(getattr(middle, field), 1) - 1 for field in ViewHeld._fields}
    print("second half: " + ", ".join(f"{name} {100 * share:+.1f} %" for name, share in growth.items()))
    return int(any(share > MAX_GROWTH for share in growth.values()))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
