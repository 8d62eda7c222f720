"""Headless Chromium over its debugging pipe (--remote-debugging-pipe): no driver and no package is needed."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tests import children

PATIENCE_S = 30.0
PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class ScriptError(Exception):
    """What a script of the page threw."""


# The browser reads descriptor 3 and writes descriptor 4.
_EXEC = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execvp(sys.argv[3], sys.argv[3:])"
)


def _above_four(descriptor: int) -> int:
    """The same, where it is in the way of neither 3 nor 4, which the browser reads and writes."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(descriptor)
    return moved


class Chromium:
    """A browser with one profile. Tabs share its storage, as tabs of a person do."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None
        their_in, self._out = map(_above_four, os.pipe())
        self._in, their_out = map(_above_four, os.pipe())

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        command = [PROGRAM, *flags, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        self._process = children.start(
            [sys.executable, "-c", _EXEC, str(their_in), str(their_out), *command],
            pass_fds=(their_in, their_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._rest = b""
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._read()
            if reply.get("id") == number:
                if "error" in reply:
                    raise AssertionError(f"{method}: {reply['error']}")
                return reply["result"]  # type: ignore[no-any-return]
            self.events.append(reply)

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            piece = os.read(self._in, 1 << 16)
            assert piece, "the browser ended"
            self._rest += piece
        whole, _, self._rest = self._rest.partition(b"\0")
        return json.loads(whole)  # type: ignore[no-any-return]

    def tab(
        self, url: str, *, width: int = 1200, height: int = 800, dark: bool = False, touched: bool = False
    ) -> "Tab":
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Tab(self, session, url, width, height, dark, touched)

    def close(self) -> None:
        children.end(self._process)
        os.close(self._in)
        os.close(self._out)


class Tab:
    """One page."""

    def __init__(
        self, browser: Chromium, session: str, url: str, width: int, height: int, dark: bool, touched: bool
    ) -> None:
        self._browser = browser
        self._session = session
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[theme])
        if touched:  # as a phone: its pointer is coarse
            self._call("Emulation.setTouchEmulationEnabled", enabled=True)
        self.go(url)

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, self._session, **params)

    def go(self, url: str) -> None:
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def reload(self) -> None:
        self.run("window.leaving = true")
        self._call("Page.reload")
        self.until("!window.leaving && document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; promises are awaited."""
        result = self._call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, userGesture=True
        )
        if "exceptionDetails" in result:
            raise ScriptError(result["exceptionDetails"].get("exception", {}).get("description", str(result)))
        return result["result"].get("value")

    def until(self, script: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until an expression is true."""
        deadline_s = time.monotonic() + patience_s
        while True:
            with suppress(ScriptError, AssertionError):
                if self.run(f"Boolean({script})"):
                    return
            assert time.monotonic() < deadline_s, f"never true: {script}\n{self.run('document.body.innerText')}"
            time.sleep(0.02)

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        code = {"Enter": 13, "Escape": 27, "Tab": 9, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}[
            key
        ]
        text = {"text": "\r"} if key == "Enter" else {}
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def answer_dialog(self, accept: bool, text: str = "") -> None:
        self._call("Page.handleJavaScriptDialog", accept=accept, promptText=text)

    def held(self) -> tuple[int, int]:
        """Of this page after a garbage collection: the JavaScript heap in KiB, and the nodes of its document."""
        self._call("HeapProfiler.collectGarbage")
        self._call("Performance.enable")
        metrics = {each["name"]: each["value"] for each in self._call("Performance.getMetrics")["metrics"]}
        return int(metrics["JSHeapUsedSize"]) >> 10, int(metrics["Nodes"])

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def complaints(self) -> list[str]:
        """Errors of scripts and refusals of the content security policy so far."""
        self.run("0")
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(event["params"]["exceptionDetails"]))
            if event["method"] == "Log.entryAdded" and event["params"]["entry"]["source"] in ("security", "javascript"):
                found.append(event["params"]["entry"]["text"])
        return found


@contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    browser = Chromium(profile)
    try:
        yield browser
    finally:
        browser.close()
