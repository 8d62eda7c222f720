"""Traces of requests: reads the known file formats, one line per request; draws arrival times and prompts from a seed.

A trace has lengths, never text. The samples in the package come from the sources in `data/README.md`.
"""

import csv
import gzip
import io
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

from quire.core.errors import ConfigError, shown
from quire.core.ids import IntArray

CHUNK = 512  # prompt tokens per prefix id
_Record = Mapping[str, object]


class TraceRow(NamedTuple):
    """One request. `prefix_ids` name chunks of 512 prompt tokens: equal ids are equal tokens."""

    arrived_s: float  # since the start of the trace; 0 where it was not recorded
    num_prompt: int
    num_output: int
    prefix_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRow]:
    """All requests of a file, .csv or .jsonl, gzipped or not."""
    try:
        return parse_trace(path.read_bytes(), str(path))
    except OSError as error:
        raise ConfigError(f"The trace {path} cannot be read: {error.strerror or error}.") from None


def parse_trace(content: bytes, name: str) -> list[TraceRow]:
    """The requests in the content of a file; `name` is for error messages."""
    try:
        text = (gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content).decode()
        first, lines = text.lstrip()[:1], io.StringIO(text)
        fields: Iterable[_Record] = csv.DictReader(lines)
        if first == "{":
            fields = map(json.loads, filter(str.strip, lines))
        rows = _rows(list(fields), name)
    except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
        raise ConfigError(f"The trace {name} is damaged: {shown(error)}.") from None
    if not rows:
        raise ConfigError(f"The trace {name} holds no request.")
    for row in rows:
        if row.num_prompt < 1 or row.num_output < 1:
            raise ConfigError(f"The trace {name} has a request of {row.num_prompt} to {row.num_output} tokens.")
    return rows


def _rows(records: list[_Record], name: str) -> list[TraceRow]:
    columns = set(records[0]) if records else set()
    for column, parse in _FORMATS.items():
        if column in columns:
            rows = sorted((parse(record) for record in records), key=lambda row: row.arrived_s)
            return [row._replace(arrived_s=row.arrived_s - rows[0].arrived_s) for row in rows]
    known = ", ".join(_FORMATS)
    raise ConfigError(f"The trace {name} has no known format: its columns have none of {known}.")


def _sharegpt(record: _Record) -> TraceRow:
    return TraceRow(0.0, _whole(record["num_prefill_tokens"]), _whole(record["num_decode_tokens"]))


def _azure(record: _Record) -> TraceRow:
    stamp, _, fraction = str(record["TIMESTAMP"]).partition(".")
    arrived_s = datetime.fromisoformat(stamp + "+00:00").timestamp() + float(f"0.{fraction or 0}")
    return TraceRow(arrived_s, _whole(record["ContextTokens"]), _whole(record["GeneratedTokens"]))


def _mooncake(record: _Record) -> TraceRow:
    ids = record["hash_ids"]
    if not isinstance(ids, list):
        raise TypeError("hash_ids is not a list")
    lengths = _whole(record["input_length"]), _whole(record["output_length"])
    return TraceRow(_whole(record["timestamp"]) / 1000, *lengths, tuple(map(_whole, ids)))


def _whole(value: object) -> int:
    return int(str(value))


_FORMATS: dict[str, Callable[[_Record], TraceRow]] = {
    "num_prefill_tokens": _sharegpt,
    "ContextTokens": _azure,
    "hash_ids": _mooncake,
}


_FILES = {"sharegpt": "sharegpt_lengths.csv.gz", "mooncake": "mooncake_synthetic.jsonl.gz"}
_STALL, _STALL_PROMPTS = "stall", 300
SAMPLES = (*_FILES, _STALL)


def sample(name: str) -> list[TraceRow]:
    """A trace of the package by its name. `stall`: 32 chats, and from 4 s on a prompt of 8,192 tokens every 2 s."""
    if name == _STALL:
        chats = [TraceRow(0.02 * number, 256, 1500) for number in range(32)]
        return chats + [TraceRow(4.0 + 2 * number, 8192, 8) for number in range(_STALL_PROMPTS)]
    if name not in _FILES:
        raise ConfigError(
            f"There is no sample and no file {shown(name)}; there are {', '.join(SAMPLES)}, or name a trace, .csv or "
            f".jsonl.",
            param="workload",
        )
    file = resources.files("quire.workload") / "data" / _FILES[name]
    return parse_trace(file.read_bytes(), file.name)


def trace_rows(trace: str) -> list[TraceRow]:
    """The requests of a file, or of a sample in the package."""
    path = Path(trace)
    named_as_file = path.suffix in (".csv", ".jsonl", ".gz") or (trace not in SAMPLES and path.exists())
    return read_trace(path) if named_as_file else sample(trace)


class TraceWindow(NamedTuple):
    """A part of a trace: its arrivals from `from_s` on for `seconds`, in the time of the replay."""

    from_s: float = 0.0
    seconds: float = 60.0
    scale: float = 1.0  # factor on the arrival rate
    rate: float | None = None  # random arrivals per second instead of the trace's
    max_prompt: int | None = None  # tokens; requests with longer prompts are left out

    def select(self, rows: Iterable[TraceRow], trace: str, seed: int = 0) -> list[TraceRow]:
        """The requests of the window; `trace` is for error messages."""
        limit = self.max_prompt
        rows = [row for row in rows if limit is None or row.num_prompt <= limit]
        if not rows:
            raise ConfigError(f"Every prompt of {trace} has more than {limit} tokens.")
        if self.rate is not None or rows[-1].arrived_s == 0.0:
            rows = poisson(rows, self.rate or _DEFAULT_RATE, seed)
        last_s = rows[-1].arrived_s
        rows = [row._replace(arrived_s=(row.arrived_s - self.from_s) / self.scale) for row in rows]
        rows = [row for row in rows if 0 <= row.arrived_s < self.seconds]
        if not rows:
            raise ConfigError(
                f"No request of {trace} comes within {self.seconds:g} s after the first {self.from_s:g}, at "
                f"{self.scale:g} times its speed: it has {last_s:.0f} s. Start earlier, or give more seconds."
            )
        return rows


_DEFAULT_RATE = 8.0  # a second, where the trace has no arrivals


def poisson(rows: Iterable[TraceRow], per_s: float, seed: int) -> list[TraceRow]:
    """The same requests in the same order, at an average rate."""
    assert per_s > 0, per_s
    generator = np.random.default_rng(seed)
    now_s, arrived = 0.0, []
    for row in rows:
        now_s += float(generator.exponential(1 / per_s))
        arrived.append(row._replace(arrived_s=now_s))
    return arrived


def prompt_of(row: TraceRow, number: int, vocab_size: int, seed: int = 0) -> IntArray:
    """The prompt of a request: each chunk from its prefix id; without ids all from the request itself, so that
    prompts of another window share nothing with it."""
    own = (seed, 0, number, row.num_prompt, int(max(row.arrived_s, 0.0) * 1e6))
    if not row.prefix_ids:
        return _draw(own, row.num_prompt, vocab_size)
    chunks = [_draw((seed, 1, prefix_id), CHUNK, vocab_size) for prefix_id in row.prefix_ids]
    missing = row.num_prompt - CHUNK * len(chunks)
    if missing > 0:  # tokens without an id are not shared
        chunks.append(_draw(own, missing, vocab_size))
    return np.concatenate(chunks)[: row.num_prompt]


def _draw(seed: tuple[int, ...], count: int, vocab_size: int) -> IntArray:
    return np.random.default_rng(seed).integers(1, vocab_size, count, dtype=np.int32)
