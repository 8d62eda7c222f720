"""The per-token histogram is written as prometheus_client's own would be."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from quire.engine.stats import EngineInfo, MemoryUsage
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
    memory = MemoryUsage(weights=5, kv=7, recorded=1, workspace=2, other=3, free=4)
    metrics.engine.info = lambda: EngineInfo("m", 8, 8, 8, 8, 16, "cpu", "float32", memory, 0, 1)
    values = {line.rpartition(b" ")[0]: line.rpartition(b" ")[2] for line in metrics.page().splitlines()}
    held = [values[b'quire_memory_bytes{holder="%b"}' % holder] for holder in (b"weights", b"kv", b"other", b"free")]
    assert held == [b"5.0", b"7.0", b"3.0", b"4.0"]
