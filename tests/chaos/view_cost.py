"""What the stream of the page /engine costs the engine at 256 rows and 50 steps per second.

`python -m tests.chaos.view_cost` runs a toy model of 256 decoding rows and 44,000 blocks in this process and times, in
CPU seconds of its thread, what the view adds: `note_step` after each step, and the two descriptions a second that a
stream asks for, however many pages are open. `python -m tests.chaos.view_cost SECONDS` measures a real engine process
instead: its CPU time with and without an open stream, in turns of so many seconds.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from quire.engine.wire import as_json
from quire.server.engine_state import STREAM_PERIOD_S, EngineState, follow
from tests.chaos.view_soak import NUM_ROWS, WATCH
from tests.engine.test_engine_view import Watched
from tests.server.many_clients import RawClient, request
from tests.server.scripted_servers import completion_body, scripted
from tests.server.server_process import Running

STEP_S = 0.02
NUM_STEPS = 600
STEPS_PER_EVENT = round(STREAM_PERIOD_S / STEP_S)
NUM_VIEWERS = 3
NUM_TURNS = 10


async def in_process(num_viewers: int) -> tuple[float, float, float]:
    """Share of the engine's time, seconds of a step, seconds of a description."""
    watched = Watched(num_blocks=44_000, max_rows=NUM_ROWS, max_step_tokens=4096)
    for number in range(NUM_ROWS):
        watched.submit(number, 20, max_tokens=900)
    note_s, describe_s = list[float](), list[float]()

    async def query(what: str, since: int) -> bytes:
        began_s = time.thread_time()
        reply = as_json(watched.view.describe(since))
        describe_s.append(time.thread_time() - began_s)
        return reply

    state = EngineState(query, lambda: watched.now_s, lambda: 60.0)  # woken below, on the engine's clock
    viewers = [follow(lambda: state, -1, None) for _ in range(num_viewers)]
    for each in viewers:
        await anext(each)
    for number in range(NUM_STEPS):
        started_s = watched.now_s
        watched.engine.step()
        watched.now_s += STEP_S
        began_s = time.thread_time()
        watched.view.note_step(started_s)
        note_s.append(time.thread_time() - began_s)
        if number % STEPS_PER_EVENT == 0 and viewers:
            waiting = [asyncio.ensure_future(anext(each)) for each in viewers]
            await asyncio.sleep(0)
            state.wake()
            await asyncio.gather(*waiting)
    half = NUM_STEPS // 2  # all rows decode
    note, describe = statistics.mean(note_s[half:]), statistics.mean(describe_s[len(describe_s) // 2 :] or [0.0])
    return note / STEP_S + describe / STREAM_PERIOD_S, note, describe


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def one_row(port: int) -> None:
    while True:
        await (await RawClient.connect(port, request(completion_body("endless", max_tokens=2000)))).receive_all()


async def read(port: int) -> None:
    stream = await RawClient.connect(port, WATCH)
    try:
        while True:
            await stream.receive_some()
            stream.received.clear()
    finally:
        stream.disconnect()


async def in_turns(server: Running, seconds: float) -> None:
    rows = [asyncio.create_task(one_row(server.port)) for _ in range(NUM_ROWS)]
    await asyncio.sleep(10)
    shares: dict[bool, list[float]] = {False: [], True: []}
    for turn in range(2 * NUM_TURNS):
        is_open = turn % 2 == 1
        viewers = [asyncio.create_task(read(server.port)) for _ in range(NUM_VIEWERS if is_open else 0)]
        await asyncio.sleep(6)  # without a stream the engine records for five seconds more
        before_s, began_s = cpu_s(server.engine_pid), time.monotonic()
        await asyncio.sleep(seconds)
        shares[is_open].append((cpu_s(server.engine_pid) - before_s) / (time.monotonic() - began_s))
        for each in viewers:
            each.cancel()
        await asyncio.gather(*viewers, return_exceptions=True)
    for is_open, found in shares.items():
        listed = " ".join(f"{100 * share:.1f}" for share in found)
        words = f"{NUM_VIEWERS} streams" if is_open else "no stream"
        print(f"{words}: median {100 * statistics.median(found):.2f} % of a core ({listed})")
    differences = [100 * (after - before) for before, after in zip(shares[False], shares[True], strict=True)]
    print(f"difference: median {statistics.median(differences):.2f} percentage points")
    for each in rows:
        each.cancel()
    await asyncio.gather(*rows, return_exceptions=True)


def main(seconds: float | None) -> None:
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if seconds is None:
        for num_viewers in (0, 1, NUM_VIEWERS) * 3:
            share, note, describe = asyncio.run(in_process(num_viewers))
            print(
                f"{num_viewers} streams: {100 * share:.2f} % of the engine's time "
                f"({1e6 * note:.1f} us a step, {1e3 * describe:.2f} ms a description)"
            )
        return
    sizes = ("--max-num-seqs", str(NUM_ROWS), "--max-waiting", str(NUM_ROWS))
    with tempfile.TemporaryDirectory() as name, scripted(Path(name), *sizes, step_ms=1000 * STEP_S) as server:
        asyncio.run(in_turns(server, seconds))


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else None)
