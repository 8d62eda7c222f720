"""Who holds the device's memory, once an engine is ready. Knows bytes, not what is in them."""

from dataclasses import dataclass, fields

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class MemoryLedger:
    """In bytes. On a CPU, whose memory is everybody's, only the first two are told."""

    weights: int = 0
    kv: int = 0
    recorded: int = 0  # by warming up and by recorded steps
    workspace: int = 0  # left free for the work of steps
    other: int = 0  # by the driver, by other programs, and what cannot be told apart
    free: int = 0  # beyond the workspace

    def describe(self) -> str:
        parts = [(field.name, getattr(self, field.name)) for field in fields(self)]
        return " · ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in parts if size)


def settle(*, weights: int, kv: int, recorded: int, workspace: int, free: int, total: int) -> MemoryLedger:
    """The ledger of a GPU with so many bytes in all, of which so many are free now."""
    kept = min(workspace, free)
    other = max(total - free - weights - kv - recorded, 0)
    return MemoryLedger(weights, kv, recorded, kept, other, free - kept)
