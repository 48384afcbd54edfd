"""A page of a server in a real browser without a window, driven over the DevTools protocol through a pipe.

docs: https://chromedevtools.github.io/devtools-protocol/. A pipe (`--remote-debugging-pipe`) needs neither a port nor a
package: messages are JSON documents that end with a NUL, on descriptors 3 and 4 of the browser.
"""

import base64
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from browser import CHROMIUM

_LIMIT_S = 60


class DrivenBrowser:
    """A browser with one page at a time."""

    def __init__(self, profile: Path):
        to_read, self._writes = os.pipe()
        self._reads, to_write = os.pipe()
        command = [
            str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
            f"--user-data-dir={profile}", "about:blank",
        ]  # fmt: skip
        shell = f'exec "$@" 3<&{to_read} 4>&{to_write}'
        self._process = subprocess.Popen(
            ["bash", "-c", shell, "-", *command], pass_fds=(to_read, to_write), start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._kept, self._number, self._session = b"", 0, ""
        self.events: list[dict[str, Any]] = []
        """Events of the page, such as messages of its console and requests."""

    def close(self) -> None:
        """End the browser and its helpers."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._reads)
        os.close(self._writes)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol; AssertionError for its errors."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._writes, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read(_LIMIT_S)
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer.get("error"))
                found: dict[str, Any] = answer["result"]
                return found
            self.events.append(answer)

    def _read(self, limit_s: float) -> dict[str, Any]:
        end = time.monotonic() + limit_s
        while b"\0" not in self._kept:
            ready, _, _ = select.select([self._reads], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser says nothing"
            data = os.read(self._reads, 1 << 16)
            assert data, "the browser has ended"
            self._kept += data
        text, _, self._kept = self._kept.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        return message

    def open(self, address: str, *, width: int = 1400, height: int = 1000, dark: bool = False) -> None:
        """Open a page in a new tab, in a window of that size, in light or dark."""
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.events.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self.call("Emulation.setScrollbarsHidden", hidden=True)  # pictures are then as wide as the window
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=address)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, waited for if it is a promise."""
        asked = {"expression": script, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        found = self.call("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, limit_s: float = _LIMIT_S) -> None:
        """Wait until an expression is true; AssertionError if that takes too long."""
        end = time.monotonic() + limit_s
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.02)

    def type(self, selector: str, text: str) -> None:
        """Put a text in the place of that of a control, as a keyboard would."""
        self.run(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.call("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Choose an option of a list."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{found}.value = {json.dumps(value)}; {found}.dispatchEvent(new Event('input', {{bubbles: true}}))")

    def press(self, selector: str, text: str = "") -> None:
        """Press the first element of a selector with that text."""
        self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            f".find(each => each.textContent.includes({json.dumps(text)})).click()"
        )

    def give_file(self, selector: str, path: Path) -> None:
        """Give a file to a control that takes one."""
        root = self.call("DOM.getDocument")["root"]["nodeId"]
        node = self.call("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self.call("DOM.setFileInputFiles", nodeId=node, files=[str(path)])

    def picture(self, *, whole: bool = True) -> bytes:
        """The page, or what a window shows of it, as a PNG."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        return base64.b64decode(found["data"])

    def list_complaints(self) -> list[str]:
        """Everything that the browser complained about since the page was opened."""
        self.run("0")  # events that came before are read first
        found = []
        for event in self.events:
            method, said = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(str(said["exceptionDetails"]))
            elif method == "Runtime.consoleAPICalled" and said["type"] in ("error", "warning", "assert"):
                found.append(str(said["args"]))
            elif method == "Log.entryAdded" and said["entry"]["level"] in ("error", "warning"):
                found.append(str(said["entry"]))
        return found

    def list_hosts(self) -> set[str]:
        """Hosts of all requests since the page was opened; data and blobs have none."""
        self.run("0")
        addresses = [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]
        return {address.split("/")[2] for address in addresses if address.startswith(("http", "ws"))}


@contextmanager
def driven_browser(profile: Path) -> Iterator[DrivenBrowser]:
    """A browser that is ended afterwards."""
    browser = DrivenBrowser(profile)
    try:
        yield browser
    finally:
        browser.close()
