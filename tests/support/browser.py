"""Chromium without a window, spoken to over a pipe: what a page says, asks for and looks like."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One tab.

    Attributes:
        requests: addresses that it asked for, by any means.
        complaints: what stood in its console, and exceptions.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        ours, theirs = os.pipe(), os.pipe()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._number, self._buffer, self._session = 0, b"", None

        def at_three_and_four() -> None:
            # Copies first: one of them may be 3 or 4 itself.
            copies = os.dup(theirs[0]), os.dup(ours[1])
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        self._process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
             "--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}"],
            preexec_fn=at_three_and_four,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs[0])
        os.close(ours[1])
        self._in, self._out = ours[0], theirs[1]
        os.set_blocking(self._in, False)
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The answer to a command of the DevTools protocol."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (found := self._next()).get("id") != self._number:
            self._note(found)
        assert "error" not in found, found
        result: dict[str, Any] = found["result"]
        return result

    def open(self, address: str) -> None:
        """Go there, until all of it is loaded."""
        self.requests.clear()
        self.complaints.clear()
        self.ask("Page.navigate", url=address)
        while (found := self._next()).get("method") != "Page.loadEventFired":
            self._note(found)

    def see_as(self, width: int, theme: str, medium: str = "") -> None:
        """Show pages in that width, theme ("light" or "dark") and medium ("print")."""
        self.ask("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        features = [{"name": "prefers-color-scheme", "value": theme}]
        self.ask("Emulation.setEmulatedMedia", media=medium, features=features)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression is; the page's policy does not bind it."""
        return self.ask("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def _next(self) -> dict[str, Any]:
        until = time.monotonic() + 60
        while b"\0" not in self._buffer:
            assert time.monotonic() < until, "Chromium says nothing"
            try:
                self._buffer += os.read(self._in, 1 << 20)
            except BlockingIOError:
                time.sleep(0.005)
        message, _, self._buffer = self._buffer.partition(b"\0")
        found: dict[str, Any] = json.loads(message)
        return found

    def _note(self, message: dict[str, Any]) -> None:
        method, told = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self.complaints.append(json.dumps(told))
