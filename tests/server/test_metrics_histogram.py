"""The per-token histogram is written as prometheus_client's own would be."""

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from quire.engine.stats import EngineInfo, EngineStats, MemoryUsage
from quire.server.metrics import Distribution, Metrics

BUCKETS = (0.001, 0.5, 1.0, 60.0)


@given(st.lists(st.floats(0, 100) | st.sampled_from(BUCKETS)))
def test_the_histogram_is_written_as_the_librarys_own(values: list[float]) -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    distribution = Distribution("wait_seconds", "How long.", BUCKETS)
    own.register(distribution)
    histogram = Histogram("quire_wait_seconds", "How long.", buckets=BUCKETS, registry=theirs)
    for value in values:
        distribution.observe(value)
        histogram.observe(value)
    assert generate_latest(own) == generate_latest(theirs)


def test_device_memory_is_reported_by_holder() -> None:
    metrics = Metrics(lambda: None, lambda: 0.0)
    assert b'quire_memory_bytes{holder="kv"} 0.0' in metrics.page(), "before there is an engine"
    memory = MemoryUsage(weights=5, kv=7, graphs=1, workspace=2, other=3, free=4)
    metrics.engine.info = lambda: EngineInfo("m", 8, 8, 8, 8, 16, "cpu", "float32", memory, 0, 1)
    values = {line.rpartition(b" ")[0]: line.rpartition(b" ")[2] for line in metrics.page().splitlines()}
    held = [values[b'quire_memory_bytes{holder="%b"}' % holder] for holder in (b"weights", b"kv", b"other", b"free")]
    assert held == [b"5.0", b"7.0", b"3.0", b"4.0"]


def test_steps_without_a_graph_are_counted_over_restarts_and_later_graphs_take_free_memory() -> None:
    nothing = dict.fromkeys((field.name for field in fields(EngineStats)), 0)
    launched = {"replayed_steps": 90, "eager_steps": 3, "eager_s": 0.25, "capture_s": 0.5, "captured_shapes": 30}
    launched |= {"drafted_by_eagle": 8, "accepted_by_eagle": 5}
    stats = EngineStats(**{**nothing, **launched, "captured_bytes": 3, "waiting_for": None})
    metrics = Metrics(lambda: stats, lambda: 0.0)
    memory = MemoryUsage(weights=5, kv=7, graphs=1, workspace=2, other=3, free=4)
    metrics.engine.info = lambda: EngineInfo("m", 8, 8, 8, 8, 16, "cuda", "float32", memory, 0, 1)
    metrics.engine.note_loss()  # and the next engine has done as much
    page = metrics.page().decode()
    for line in (
        "quire_replayed_steps_total 180.0",
        "quire_eager_steps_total 6.0",
        "quire_eager_launch_seconds_total 0.5",
        "quire_graph_capture_seconds_total 1.0",
        "quire_captured_shapes 30.0",
        'quire_spec_decode_drafted_tokens_by_total{drafter="eagle"} 16.0',
        'quire_spec_decode_accepted_tokens_by_total{drafter="eagle"} 10.0',
        'quire_spec_decode_drafted_tokens_by_total{drafter="ngram"} 0.0',
        'quire_memory_bytes{holder="graphs"} 3.0',
        'quire_memory_bytes{holder="free"} 2.0',
    ):
        assert line in page, line
