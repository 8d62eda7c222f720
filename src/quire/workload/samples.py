"""The samples of known traces that come with the package. Where they are from: `data/README.md`."""

from importlib import resources

from quire.core.errors import ConfigError
from quire.workload.trace import TraceRow, parse_trace

_FILES = {"sharegpt": "sharegpt_lengths.csv.gz", "mooncake": "mooncake_synthetic.jsonl.gz"}
SAMPLES = tuple(_FILES)


def sample(name: str) -> list[TraceRow]:
    if name not in _FILES:
        raise ConfigError(f"There is no sample {name!r}; there are {', '.join(SAMPLES)}.", param="workload")
    file = resources.files("quire.workload") / "data" / _FILES[name]
    return parse_trace(file.read_bytes(), file.name)
