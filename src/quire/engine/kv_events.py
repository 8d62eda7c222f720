"""Settings of the KV events that an engine publishes: vLLM's `--kv-events-config`. Does not depend on ZMQ."""

import json
import re
from dataclasses import dataclass, replace

from quire.core.errors import ConfigError

_TCP = re.compile(r"(tcp://.+:)(\d{1,5})")
_ENDPOINT = re.compile(r"tcp://[^\s:/]+:(?:\d{1,5}|\*)|tcp://\[[0-9a-fA-F:]+\]:\d{1,5}|ipc://\S+")
_LARGEST = 1_000_000


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    """Where events are published and replayed, and how many are kept."""

    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000  # batches kept for replay
    hwm: int = 100_000  # batches that wait for one slow subscriber; it loses those beyond
    max_queue_size: int = 100_000  # batches that wait for the publishing thread
    topic: str = ""
    rank: int = 0  # of several replicas: `data_parallel_rank` of the batches

    def __post_init__(self) -> None:
        for name in ("endpoint", "replay_endpoint"):
            value = getattr(self, name)
            if value is not None and not _ENDPOINT.fullmatch(value):
                raise ConfigError(
                    f"{name} of --kv-events-config is {value!r:.100}; write for example tcp://127.0.0.1:5557.",
                    param="kv_events",
                )
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if not 1 <= value <= _LARGEST:
                raise ConfigError(
                    f"{name} of --kv-events-config is {value}; it may be 1 to {_LARGEST}.", param="kv_events"
                )
        if self.endpoint == self.replay_endpoint and not self.endpoint.endswith("*"):
            raise ConfigError(
                f"endpoint and replay_endpoint of --kv-events-config are both {self.endpoint}; use another port for "
                f"one of them.",
                param="kv_events",
            )

    def of_replica(self, rank: int) -> "KvEventsConfig":
        """The same for one of several engines: a port, or a path, of its own."""
        moved = None if self.replay_endpoint is None else _moved(self.replay_endpoint, rank)
        return replace(self, endpoint=_moved(self.endpoint, rank), replay_endpoint=moved, rank=rank)


def _moved(endpoint: str, rank: int) -> str:
    tcp = _TCP.fullmatch(endpoint)
    if tcp is not None:
        return f"{tcp[1]}{int(tcp[2]) + rank}"
    return endpoint if rank == 0 or endpoint.startswith("tcp://") else f"{endpoint}.{rank}"


# vLLM's fields, and their types.
_FIELDS: dict[str, tuple[type, ...]] = {
    "enable_kv_cache_events": (bool,),
    "publisher": (str, type(None)),
    "endpoint": (str,),
    "replay_endpoint": (str, type(None)),
    "buffer_steps": (int,),
    "hwm": (int,),
    "max_queue_size": (int,),
    "topic": (str,),
}


def read_kv_events(text: str | None) -> KvEventsConfig | None:
    """The settings in a JSON object; None if nothing is to be published."""
    if text is None:
        return None
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(str(error)) from error
    if not isinstance(given, dict):
        raise _unreadable("it is not an object")
    for name, value in given.items():
        if name not in _FIELDS:
            raise _unreadable(f"there is no field {name!r:.40}")
        if type(value) not in _FIELDS[name]:
            raise _unreadable(f"{name} is {value!r:.40}")
    publisher = given.pop("publisher", None)
    if publisher not in (None, "zmq", "null"):
        raise ConfigError(
            f"publisher of --kv-events-config is {publisher!r:.40}; it may be zmq or null.", param="kv_events"
        )
    enabled = given.pop("enable_kv_cache_events", True)
    return KvEventsConfig(**given) if enabled and publisher != "null" else None


def _unreadable(reason: str) -> ConfigError:
    return ConfigError(
        f"--kv-events-config cannot be read: {reason}. It is a JSON object with the fields {', '.join(_FIELDS)}, such "
        f'as {{"endpoint": "tcp://127.0.0.1:5557"}}.',
        param="kv_events",
    )
