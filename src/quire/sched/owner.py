"""On whose behalf a sequence uses the cache."""

from quire.core.request import Sequence
from quire.kv.manager import Owner


def owner_of(sequence: Sequence) -> Owner:
    request = sequence.request
    return Owner(request.id, request.partition, request.priority)
