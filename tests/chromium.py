"""A headless Chromium for tests, driven over its pipe: no driver, no port, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
START_S = 120.0


def find() -> str | None:
    """The browser of this machine; None if it has none."""
    return next((path for name in NAMES if (path := shutil.which(name)) is not None), None)


class Chromium:
    """One page of one browser.

    Attributes:
        errors: what the page's scripts threw or logged as an error.
        requests: what the page asked the network for.
    """

    def __init__(self, binary: str, profile: Path) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._answers: dict[int, dict[str, Any]] = {}
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()

        def as_three_and_four() -> None:
            # Both are moved away first: either may be 3 or 4 already.
            source, sink = os.dup(to_browser), os.dup(from_browser)
            read, write = (os.dup(fd) if fd < 5 else fd for fd in (source, sink))
            os.dup2(read, 3)
            os.dup2(write, 4)

        self._process = subprocess.Popen(
            [
                binary,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--no-first-run",
                "--disable-background-networking",
                "--disable-component-update",
                f"--user-data-dir={profile}",
                "--remote-debugging-pipe",
                "about:blank",
            ],
            preexec_fn=as_three_and_four,  # noqa: PLW1509  # the browser takes its pipe at 3 and 4 and nowhere else
            close_fds=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Chromium:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, /, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol, and its result."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + START_S
        while self._number not in self._answers:
            self._read(end - time.monotonic())
        answer = self._answers.pop(self._number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _read(self, seconds: float) -> None:
        if seconds <= 0 or not select.select([self._in], [], [], seconds)[0]:
            raise TimeoutError(f"the browser said nothing for {START_S:g} s")
        part = os.read(self._in, 1 << 20)
        if not part:
            raise RuntimeError(f"the browser ended with code {self._process.wait()}")
        *messages, self._buffer = (self._buffer + part).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self._note(message["method"], message["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:2000])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(json.dumps(params["args"])[:2000])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def resize(self, width: int, height: int, *, is_phone: bool = False, is_dark: bool = False) -> None:
        """As a device of that size shows a page."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, path: Path, *, until: str, seconds: float = 240.0) -> None:
        """Open a file and wait until an expression is true there."""
        self.call("Page.navigate", url=path.absolute().as_uri())
        end = time.monotonic() + seconds
        while not self.evaluate(until):
            if time.monotonic() > end:
                raise TimeoutError(f"not true within {seconds:g} s: {until}; errors: {self.errors}")
            time.sleep(0.1)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def screenshot(self, path: Path, *, whole: bool = False) -> Path:
        """Keep a picture of what is shown, or of the whole page."""
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))
        return path
