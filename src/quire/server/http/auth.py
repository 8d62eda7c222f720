"""API keys and the identities that hold them. Keeps digests of keys, never keys. Does not depend on routes.

A key file has one key per line; what follows a key is optional:

    # name: identity in logs and in the weighted fair queue; weight: its share of the engine under load
    sk-first
    sk-second name=batch weight=0.5 max_open=8
    sk-third name=ops trusted
"""

import hashlib
import ipaddress
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import ConfigError

_KEY = re.compile(r"[!-~]{1,512}")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_IPV6_SITE_BITS = 64  # of an address: the rest is the client's own choice


@dataclass(frozen=True, slots=True)
class Identity:
    """The holder of one or more keys. Logs and metrics may show its name."""

    name: str
    weight: float = 1.0  # in weighted fair queuing
    trusted: bool = False  # may set priority and timeout
    admin: bool = False
    max_open: int | None = None  # concurrent requests; None: no limit

    @property
    def tenant(self) -> str:
        """The tenant in the prefix cache, and with keys in fair queuing. Without keys there is one tenant, and each
        network has its own share (`client_name`)."""
        return "" if self is ANONYMOUS else self.name


ANONYMOUS = Identity("anonymous", trusted=True)  # every client of a server without keys
UNAUTHENTICATED = Identity("nobody", max_open=0)  # before a key is found; the name is in logs
ADMIN = Identity("admin", trusted=True, admin=True)


def client_name(identity: Identity, address: tuple[str, int] | None) -> str:
    """The client that a request counts for: its key, or without keys its network."""
    if identity is not ANONYMOUS:
        return identity.name
    return "" if address is None else network_of(address[0])


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """An IPv4 address, or the /64 of an IPv6 address."""
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return address
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((int(parsed), _IPV6_SITE_BITS), strict=False))


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own, which no other can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class KeyRing:
    """The keys of this server. Without keys it is open; an admin key alone closes only the admin routes."""

    __slots__ = ("_identities",)

    def __init__(self, keys: Iterable[tuple[str, Identity]] = ()) -> None:
        self._identities: dict[bytes, Identity] = {}
        for key, identity in keys:
            if not _KEY.fullmatch(key):
                raise ConfigError(f"The key of {identity.name} must be 1 to 512 visible ASCII characters, no spaces.")
            digest = _digest(key.encode())
            if digest in self._identities:
                raise ConfigError(f"One key was given twice, for {self._identities[digest].name} and {identity.name}.")
            self._identities[digest] = identity
        _check_names(self._identities.values())

    @property
    def open(self) -> bool:
        """Whether a client needs no key."""
        return all(identity.admin for identity in self._identities.values())

    @property
    def has_admin(self) -> bool:
        return any(identity.admin for identity in self._identities.values())

    def find(self, key: bytes) -> Identity | None:
        """The identity of a key, in constant time: all digests are compared, whichever matches."""
        digest = _digest(key)
        found = None
        for known, identity in self._identities.items():
            if secrets.compare_digest(known, digest):
                found = identity
        return found

    @property
    def weights(self) -> dict[str, float]:
        """By tenant, where it is not 1."""
        held = self._identities.values()
        return {identity.tenant: identity.weight for identity in held if identity.weight != 1.0}

    def __repr__(self) -> str:
        return f"KeyRing({len(self._identities)} keys)"


def make_key_ring(
    keys: Sequence[str], file: Path | None = None, admin_key: str | None = None, admin_file: Path | None = None
) -> KeyRing:
    """The keys of a command line: single ones, those of a file, and the admin's."""
    held = [(key, Identity(f"key-{number}")) for number, key in enumerate(keys, start=1)]
    if file is not None:
        held += read_keys(file, first_number=len(held) + 1)
    if admin_key is not None:
        held.append((admin_key, ADMIN))
    if admin_file is not None:
        held += read_admin_keys(admin_file)
    return KeyRing(held)


def read_keys(file: Path, *, first_number: int = 1) -> list[tuple[str, Identity]]:
    """The keys of a file, numbered where they have no name. An error names the line, never its content."""
    return [
        (line.words[0], _identity(line.words[1:], f"key-{number}", line.where))
        for number, line in enumerate(_lines(file, "api_key_file"), start=first_number)
    ]


def read_admin_keys(file: Path) -> list[tuple[str, Identity]]:
    """The keys of a file, all of them the admin's."""
    lines = _lines(file, "admin_key_file")
    for line in lines:
        if len(line.words) > 1:
            raise ConfigError(f"{line.where}: options are not allowed after an admin key.", param="admin_key_file")
    return [(line.words[0], ADMIN) for line in lines]


class _Line(NamedTuple):
    where: str
    words: list[str]


def _lines(file: Path, param: str) -> list[_Line]:
    """The lines with a key."""
    try:
        text = file.read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not plain ASCII text"
        raise ConfigError(f"Cannot read the keys in {file}: {reason}.", param=param) from error
    numbered = [_Line(f"{file}, line {number}", line.split()) for number, line in enumerate(text.splitlines(), start=1)]
    held = [line for line in numbered if line.words and not line.words[0].startswith("#")]
    if not held:
        raise ConfigError(f"{file} has no key; write one per line.", param=param)
    return held


def _identity(words: Sequence[str], name: str, where: str) -> Identity:
    given = dict(word.partition("=")[::2] for word in words)
    unknown = set(given) - {"name", "weight", "max_open", "trusted"}
    if unknown or len(given) < len(words) or given.get("trusted"):
        raise ConfigError(
            f"{where}: allowed options after a key: name=…, weight=…, max_open=…, trusted; each at most once.",
            param="api_key_file",
        )
    try:
        weight = float(given.get("weight", 1))
        max_open = int(given["max_open"]) if "max_open" in given else None
    except ValueError as error:
        raise ConfigError(f"{where}: weight and max_open are numbers.", param="api_key_file") from error
    if not 0 < weight <= 1000 or (max_open is not None and max_open < 1):
        raise ConfigError(f"{where}: weight is above 0 and at most 1000, max_open at least 1.", param="api_key_file")
    return Identity(given.get("name", name), weight, trusted="trusted" in given, max_open=max_open)


def _check_names(identities: Iterable[Identity]) -> None:
    """Keys with the same name must agree in all other fields."""
    known: dict[str, Identity] = {}
    for identity in identities:
        if not _NAME.fullmatch(identity.name):
            raise ConfigError("The name of a key must be 1 to 64 letters, digits, dots, dashes or underscores.")
        if identity.name in (ANONYMOUS.name, UNAUTHENTICATED.name):
            raise ConfigError(f"No key may have the name {identity.name}: it is reserved for clients without a key.")
        if known.setdefault(identity.name, identity) != identity:
            raise ConfigError(f"The keys named {identity.name} must agree in weight, max_open and trusted.")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
