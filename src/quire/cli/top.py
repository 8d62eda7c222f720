"""`quire top`: what a server is doing, once a second, from its metrics page and its load."""

import json
import time
import urllib.error
import urllib.request
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

from rich.live import Live
from rich.table import Table

from quire.cli.console import out
from quire.cli.readings import Quantiles, Reading, View, compare, read_page
from quire.core.errors import ConfigError

_TIMEOUT_S = 5.0
_BAR_COLUMNS = 20


class Server:
    """The two pages of a server that are read."""

    def __init__(self, url: str, key: str | None) -> None:
        if not _is_address(url):
            raise ConfigError(f"{url} is no address of a server; one looks like http://127.0.0.1:8000.", param="url")
        self.url = url.rstrip("/")
        self._headers = {} if key is None else {"authorization": f"Bearer {key}"}

    def read(self) -> Reading:
        page = self._get("/metrics")
        return read_page(page, time.monotonic())

    def num_open(self) -> int:
        """Requests over HTTP that are not answered yet, wherever they are."""
        page = self._get("/load")
        try:
            return int(json.loads(page).get("server_load", 0))
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{self.url}/load is not that of a quire server. Give its address as it was told."
            ) from error

    def _get(self, path: str) -> str:
        request = urllib.request.Request(self.url + path, headers=self._headers)
        try:
            with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
                return str(answer.read().decode())
        except urllib.error.HTTPError as error:
            hint = " Give its key with --api-key-file." if error.code in (401, 403) else ""
            raise ConfigError(f"{self.url}{path} answers {error.code}.{hint}") from error
        except (OSError, ValueError, HTTPException) as error:
            reason = str(getattr(error, "reason", error)).strip()
            raise ConfigError(f"Nobody answers at {self.url}: {reason}. quire serve starts a server.") from error


def top(url: str, key_file: Path | None, *, every_s: float, once: bool, as_json: bool) -> None:
    server = Server(url, None if key_file is None else _first_key(key_file))
    if once:
        before = server.read()
        time.sleep(every_s)
        _tell(server, compare(before, server.read()), as_json)
        return
    try:
        _watch(server, every_s, as_json)
    except KeyboardInterrupt:
        return


def _watch(server: Server, every_s: float, as_json: bool) -> None:
    before = server.read()
    if as_json:
        while True:
            time.sleep(every_s)
            after = server.read()
            _tell(server, compare(before, after), as_json)
            before = after
    with Live(table(server.url, compare(None, before), server.num_open()), console=out, auto_refresh=False) as live:
        while True:
            time.sleep(every_s)
            after = server.read()
            live.update(table(server.url, compare(before, after), server.num_open()), refresh=True)
            before = after


def _tell(server: Server, view: View, as_json: bool) -> None:
    num_open = server.num_open()
    if as_json:
        print(json.dumps(as_object(server.url, view, num_open)), flush=True)
    else:
        out.print(table(server.url, view, num_open))


def as_object(url: str, view: View, num_open: int) -> dict[str, object]:
    """The view for programs; quantiles by name, null where nothing happened."""
    told: dict[str, object] = {"url": url, "num_open": num_open, **asdict(view)}
    for name, value in told.items():
        if isinstance(value, Quantiles):
            told[name] = value._asdict()
    return told


def table(url: str, view: View, num_open: int) -> Table:
    drawn = Table(box=None, show_header=False, pad_edge=False, title=f"quire · {url}", title_justify="left")
    filled = round(_BAR_COLUMNS * view.kv_usage)
    state = "up" if view.engine_up else "down"
    drawn.add_row("engine", f"{state} · {view.num_engine_restarts} restarts")
    drawn.add_row("requests", f"{view.num_running} running · {view.num_waiting} waiting "
                  f"({view.num_waiting_tokens:,} tokens) · {num_open} open")  # fmt: skip
    drawn.add_row("kv cache", f"{'█' * filled}{'░' * (_BAR_COLUMNS - filled)} {100 * view.kv_usage:.0f} %"
                  f" · {view.num_preemptions} preempted")  # fmt: skip
    hits = "–" if view.prefix_hit is None else f"{100 * view.prefix_hit:.0f} %"
    drawn.add_row("tokens", f"{view.generated_tokens_per_s:,.1f} generated/s · "
                  f"{view.prompt_tokens_per_s:,.0f} prompt/s · prefix hit {hits}")  # fmt: skip
    drawn.add_row("answers", f"{view.finished_per_s:,.1f}/s · {view.refused_per_s:,.1f} refused/s")
    for name, quantiles in (
        ("first token", view.time_to_first_token),
        ("next token", view.inter_token_latency),
        ("whole", view.end_to_end),
    ):
        drawn.add_row(name, _spelled(quantiles))
    return drawn


def _spelled(quantiles: Quantiles | None) -> str:
    if quantiles is None:
        return "–"
    names = ("p50", "p90", "p99")
    return " · ".join(f"{name} {1000 * seconds:,.0f} ms" for name, seconds in zip(names, quantiles, strict=True))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:  # a bracket that is not closed, a port beyond all ports
        return False
    return named and url.isascii() and url.isprintable() and " " not in url


def _first_key(path: Path) -> str:
    """The file may be the server's own: one key per line, whatever is said of it after it."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.", param="api_key_file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} holds no keys: it is not UTF-8 text.", param="api_key_file") from error
    for line in lines:
        if line.strip() and not line.lstrip().startswith("#"):
            return line.split()[0]
    raise ConfigError(f"{path} has no key.", param="api_key_file")
