"""The histogram that is told of every token says what prometheus_client's own would."""

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from quire.server.metrics import Distribution

BUCKETS = (0.001, 0.5, 1.0, 60.0)


@given(st.lists(st.floats(0, 100) | st.sampled_from(BUCKETS)))
def test_it_is_written_as_the_librarys_own(values: list[float]) -> None:
    own, theirs = CollectorRegistry(), CollectorRegistry()
    distribution = Distribution("wait_seconds", "How long.", BUCKETS)
    own.register(distribution)
    histogram = Histogram("quire_wait_seconds", "How long.", buckets=BUCKETS, registry=theirs)
    for value in values:
        distribution.observe(value)
        histogram.observe(value)
    assert generate_latest(own) == generate_latest(theirs)
