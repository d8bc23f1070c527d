"""A headless Chromium, driven over the pipe of its DevTools protocol."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BROWSER = shutil.which("chromium") or shutil.which("google-chrome") or ""
REASON = "a page in a browser: chromium is not installed"
ANSWER_S = 60.0
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage", "--no-proxy-server",
         "--disable-background-networking", "--remote-debugging-pipe", "--hide-scrollbars")


class Browser:
    """One tab. `problems`: errors in the console, such as exceptions and what the Content-Security-Policy forbids."""

    def __init__(self, folder: Path) -> None:
        commands, self._out = os.pipe()
        self._in, answers = os.pipe()
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{commands} 4>&{answers}', "chromium", BROWSER, *FLAGS, f"--user-data-dir={folder}",
             "about:blank"],
            pass_fds=(commands, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        os.close(commands)
        os.close(answers)
        self._numbers, self._buffer, self._session = itertools.count(1), b"", ""
        self.problems: list[str] = []
        self.requests: list[str] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": self._session} if self._session else {})
        os.write(self._out, json.dumps(message).encode() + b"\0")
        for answer in self._messages(time.monotonic() + ANSWER_S):
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
        raise TimeoutError(f"{method}: no answer")

    def _messages(self, until: float) -> Iterator[dict[str, Any]]:
        with selectors.DefaultSelector() as ready:
            ready.register(self._in, selectors.EVENT_READ)
            while True:
                while b"\0" in self._buffer:
                    line, _, self._buffer = self._buffer.partition(b"\0")
                    message = json.loads(line)
                    self._note(message)
                    yield message
                if not ready.select(max(0.0, until - time.monotonic())):
                    return
                data = os.read(self._in, 1 << 16)
                if not data:
                    raise ConnectionError("the browser has ended")
                self._buffer += data

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.problems.append(details.get("exception", {}).get("description", details["text"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(str([each.get("value", each.get("description")) for each in params["args"]]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])

    def look(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """The value of JavaScript on the page."""
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def text(self) -> str:
        return str(self.value("document.body ? document.body.innerText : ''"))

    def until(self, holds: Callable[[str], bool], what: str, limit_s: float = 30.0) -> str:
        """Returns the text of the page as soon as it is as wanted."""
        end = time.monotonic() + limit_s
        while not holds(text := self.text()):
            assert time.monotonic() < end, f"{what}; the page: {text}; {self.problems}"
            time.sleep(0.05)
        return text

    def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self._session = ""
            self.call("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)  # a separate browser session started by the test
            self._process.wait(10)
        os.close(self._in)
        os.close(self._out)
