"""Traces are read in every known format; other files are refused."""

import gzip
from pathlib import Path

import numpy as np
import pytest

from quire.core.errors import ConfigError
from quire.workload.traces import SAMPLES, TraceRow, parse_trace, poisson, prompt_of, read_trace, sample

AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.2500000,396,109\n2023-11-16 18:15:46.5,374,44\n"
SHAREGPT = b"num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n74,918,992,0.08\n"
MOONCAKE = b'{"timestamp": 2000, "input_length": 600, "output_length": 5, "hash_ids": [3, 9]}\n\n'


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (AZURE, [TraceRow(0.0, 374, 44), TraceRow(3.75, 396, 109)]),
        (SHAREGPT, [TraceRow(0.0, 74, 918)]),
        (MOONCAKE, [TraceRow(0.0, 600, 5, (3, 9))]),
    ],
)
def test_every_format_is_read_compressed_or_not(content: bytes, rows: list[TraceRow], tmp_path: Path) -> None:
    assert parse_trace(content, "it") == rows
    packed = tmp_path / "trace.gz"
    packed.write_bytes(gzip.compress(content, mtime=0))
    assert read_trace(packed) == rows


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no request|no known format"),
        (b"a,b\n1,2\n", "no known format"),
        (b"ContextTokens,GeneratedTokens\n1,2\n", "damaged"),
        (SHAREGPT.replace(b"918", b"many"), "damaged"),
        (SHAREGPT.replace(b"918", b"0"), "74 to 0 tokens"),
        (MOONCAKE[:40], "damaged"),
        (MOONCAKE.replace(b"[3, 9]", b"7"), "damaged"),
        (gzip.compress(SHAREGPT, mtime=0)[:30], "damaged"),
        (b"\xff\xfe", "damaged"),
    ],
)
def test_a_file_that_is_no_trace_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_trace(content, "it")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv cannot be read"):
        read_trace(tmp_path / "none.csv")


def test_the_samples_have_the_described_lengths() -> None:
    chats = sample("sharegpt")
    assert len(chats) == 512 and SAMPLES == ("sharegpt", "mooncake", "stall")
    assert 2000 < np.mean([row.num_prompt for row in chats]) < 2700  # 2,340 and 439 in the whole
    assert 400 < np.mean([row.num_output for row in chats]) < 480
    agents = sample("mooncake")
    assert len(agents) == 128 and all(row.prefix_ids for row in agents)
    assert agents == sorted(agents, key=lambda row: row.arrived_s)
    with pytest.raises(ConfigError, match="sharegpt, mooncake"):
        sample("nothing")


def test_equal_prefix_ids_give_equal_tokens_and_others_do_not() -> None:
    one, other = (prompt_of(TraceRow(0.0, 1100, 1, ids), 0, 1000) for ids in ((1, 2), (1, 3)))
    assert len(one) == len(other) == 1100
    assert (one[:512] == other[:512]).all() and (one[512:1024] != other[512:1024]).any()
    assert (prompt_of(TraceRow(0.0, 50, 1), 1, 1000) != prompt_of(TraceRow(0.0, 50, 1), 2, 1000)).any()
    earlier, later = (prompt_of(TraceRow(arrived_s, 50, 1), 1, 1000) for arrived_s in (0.25, 1.5))
    assert (earlier[:8] != later[:8]).any(), "another window's prompts are not found in the cache"
    assert len(prompt_of(TraceRow(0.0, 700, 1, (1, 2)), 0, 1000)) == 700


def test_poisson_arrivals_keep_order_and_rate() -> None:
    rows = poisson([TraceRow(0.0, i + 1, 1) for i in range(4000)], per_s=20.0, seed=3)
    assert [row.num_prompt for row in rows] == list(range(1, 4001))
    assert rows[-1].arrived_s == pytest.approx(200, rel=0.1)
    assert rows == poisson([TraceRow(0.0, i + 1, 1) for i in range(4000)], per_s=20.0, seed=3)
