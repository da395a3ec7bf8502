"""A headless Chromium for tests, spoken to over a pipe in its DevTools protocol: no driver, no package, no network."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = [
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1200,900",
        "--no-first-run",
    ),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update", "--disable-extensions"),
]
PATIENCE = 60  # seconds
# Chromium reads commands from descriptor 3 and answers on 4
START = "import os, sys; [os.dup2(int(sys.argv[n]), n + 2) for n in (1, 2)]; os.execv(sys.argv[3], sys.argv[3:])"


class Page:
    """One tab. `requests` and `complaints` are all that it asked for, and all that went wrong in it."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.out, self.inward = to_browser, from_browser
        self.buffer, self.number, self.session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def call(self, method: str, **options: Any) -> dict[str, Any]:
        """A command of the DevTools protocol; its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": options}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self.number:
            self._note(answer)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def open(self, path: Path, dark: bool = False, script: bool = True) -> None:
        """Load a file, in the light or the dark, and wait until it stands."""
        self.requests.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.call("Page.navigate", url=path.as_uri())
        until = time.monotonic() + PATIENCE
        while self.value("document.readyState + location.href") != f"complete{path.as_uri()}":
            assert time.monotonic() < until, "the page did not load"
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        """What an expression gives in the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def pointer(self, kind: str, x: float, y: float) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def click(self, element: str) -> None:
        """A real click on the middle of what a selector's expression gives."""
        x, y = self.value(
            f"(() => {{ const one = {element}; one.scrollIntoView({{block: 'center'}});"
            " const box = one.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
        )
        self.pointer("mousePressed", x, y)
        self.pointer("mouseReleased", x, y)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            read = os.read(self.inward, 1 << 20)
            assert read, "the browser has ended"
            self.buffer += read
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" or (
            event.get("method") == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning")
        ):
            self.complaints.append(str(told))


@contextmanager
def browser(profile: Path) -> Iterator[Page]:
    """A browser of its own, with one page."""
    (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
    high = [fcntl.fcntl(one, fcntl.F_DUPFD, 20) for one in (theirs_in, theirs_out)]  # out of the way of 3 and 4
    for one in (theirs_in, theirs_out):
        os.close(one)
    own = [str(CHROMIUM), *QUIET, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
    command = [sys.executable, "-c", START, *map(str, high), *own]
    process = subprocess.Popen(command, pass_fds=high, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for one in high:
        os.close(one)
    page = Page(ours_out, ours_in)
    try:
        target = page.call("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        yield page
    finally:
        process.terminate()
        process.wait(timeout=PATIENCE)
        os.close(ours_out)
        os.close(ours_in)
