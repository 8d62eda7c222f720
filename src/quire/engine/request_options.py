"""Request options beyond sampling: priority, tenant, cache salt, timeout."""

from dataclasses import dataclass
from typing import TypedDict

from quire.core.errors import InvalidParameter, shown
from quire.core.validation import check_float, check_int, convert_numpy

MIN_PRIORITY, MAX_PRIORITY = -100, 100  # lower comes first
MAX_NAME_CHARACTERS = 256
MAX_TIMEOUT_S = 1e6  # eleven days


class RequestOptionsDict(TypedDict, total=False):
    """The same as keywords."""

    priority: int
    tenant: str
    cache_salt: str
    timeout_s: float | None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The options of one request."""

    priority: int = 0  # its class: lower comes first
    tenant: str = ""  # for the partition of the prefix cache and, without a client, for weighted fair queuing
    cache_salt: str = ""  # only requests of the same tenant and salt find each other's cached prefixes
    timeout_s: float | None = None  # it must be started before, or it ends as "expired"
    client: str = ""  # for weighted fair queuing: one of several clients of a tenant that share a cache, not a queue

    def __post_init__(self) -> None:
        convert_numpy(self, self.__slots__)
        check_int("priority", self.priority, MIN_PRIORITY, MAX_PRIORITY)
        for name in ("tenant", "cache_salt", "client"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > MAX_NAME_CHARACTERS:
                raise InvalidParameter(
                    f"{name} must be a text of at most {MAX_NAME_CHARACTERS} characters, not {shown(value)}.",
                    param=name,
                )
        if self.timeout_s is not None:
            check_float("timeout_s", self.timeout_s, 0.0, MAX_TIMEOUT_S)

    @property
    def partition(self) -> str:
        """One name for tenant and salt; no two pairs have the same."""
        return f"{len(self.tenant)}:{self.tenant}{self.cache_salt}" if self.tenant or self.cache_salt else ""

    def deadline_s(self, now_s: float) -> float | None:
        return None if self.timeout_s is None else now_s + self.timeout_s


DEFAULT_OPTIONS = RequestOptions()


def options_of(given: RequestOptionsDict, *, with_progress: bool = True) -> RequestOptions:
    """Keywords as options. A keyword of another engine is refused with its name here."""
    for name in given:
        if name not in RequestOptionsDict.__annotations__:
            instead = f"there are {', '.join(RequestOptionsDict.__annotations__)}"
            if name == "use_tqdm":
                instead = "use progress=True or False" if with_progress else "a stream draws no bar"
            raise TypeError(f"There is no parameter {name}; {instead}.")
    return RequestOptions(**given)
