"""A real browser without a window, for tests of a page: Chromium, spoken to over two pipes.

With --remote-debugging-pipe the browser reads commands from descriptor 3 and answers on 4, as JSON
with a zero byte at the end (the Chrome DevTools protocol). No package is needed for that.
"""

import base64
import fcntl
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

NAMES = "chromium", "chromium-browser", "google-chrome"
FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run"
PATH = next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page in one browser; `with` ends it."""

    def __init__(self, folder: Path, width: int = 1600, height: int = 1000):
        ends = [*os.pipe(), *os.pipe()]
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in ends]
        for fd in ends:
            os.close(fd)
        read, self.write, self.read, write = high

        def place():
            os.dup2(read, 3)
            os.dup2(write, 4)

        own = [f"--user-data-dir={folder}", f"--window-size={width},{height}"]
        self.process = subprocess.Popen(
            [PATH, *FLAGS.split(), *own, "--remote-debugging-pipe", "about:blank"],
            preexec_fn=place,
            close_fds=False,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(read)
        os.close(write)
        self.number, self.left, self.session = 0, b"", {}
        targets = self.ask("Target.getTargets")["targetInfos"]
        own = next(target["targetId"] for target in targets if target["type"] == "page")
        session = self.ask("Target.attachToTarget", targetId=own, flatten=True)
        self.session = {"sessionId": session["sessionId"]}
        for name in ("Page", "Runtime", "Network"):
            self.ask(f"{name}.enable")

    def __enter__(self):
        self.seen = []  # events
        return self

    def __exit__(self, *error):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.write)
        os.close(self.read)

    def ask(self, method: str, **arguments) -> dict:
        """The browser's answer to one command; events before it are kept."""
        self.number += 1
        said = {"id": self.number, "method": method, "params": arguments, **self.session}
        os.write(self.write, json.dumps(said).encode() + b"\0")
        while True:
            while b"\0" not in self.left:
                piece = os.read(self.read, 1 << 16)
                assert piece, "the browser has ended"
                self.left += piece
            text, _, self.left = self.left.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            if hasattr(self, "seen"):
                self.seen.append(answer)

    def open(self, address: str) -> None:
        """Load a page, and wait until it has been drawn."""
        for place in ("about:blank", address):  # by way of an empty page: it is loaded in any case
            self.ask("Page.navigate", url=place)
            page = json.dumps(place.partition("#")[0])
            while not self.run(f"location.href.split('#')[0] === {page}"):
                time.sleep(0.02)
        while self.run("document.readyState") != "complete":
            time.sleep(0.02)

    def run(self, code: str):
        """The value of a JavaScript expression in the page."""
        found = self.ask("Runtime.evaluate", expression=code, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def mouse(self, kind: str, x: float, y: float, **more) -> None:
        self.ask("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        """A real click, as of a hand."""
        self.mouse("mouseMoved", x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        """A key; a single character is typed."""
        text = {"text": key} if len(key) == 1 else {}
        self.ask("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.ask("Input.dispatchKeyEvent", type="keyUp", key=key)

    def errors(self) -> list:
        """What went wrong in the page so far, by its own account."""
        wrong = ("Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
        return [event for event in self.seen if event.get("method") in wrong]

    def requests(self) -> list[str]:
        """Every address that was asked for."""
        sent = [e for e in self.seen if e.get("method") == "Network.requestWillBeSent"]
        addresses = [event["params"]["request"]["url"] for event in sent]
        return [address for address in addresses if address != "about:blank"]

    def picture(self, path: Path) -> None:
        """Write what a person would see."""
        data = self.ask("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))
