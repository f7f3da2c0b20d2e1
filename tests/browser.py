"""A headless Chromium spoken to over two pipes: sizes, screenshots, clicks and keys, without a driver or a port."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = f"no Chromium: none of {', '.join(NAMES)} is on the PATH"
"""Why a test is skipped; .ci/run has it fail."""
PATIENCE = 60.0  # seconds for any answer; a machine under load starts slowly

FIT = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
for place, end in zip((3, 4), ends):
    os.dup2(end, place)
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""Chromium reads commands from 3 and answers on 4: the ends of the pipes are put there."""


def executable() -> str | None:
    return next((path for path in map(shutil.which, NAMES) if path), None)


class Browser:
    """One tab. Use as a context."""

    def __init__(self, folder: Path) -> None:
        reading, self._write = os.pipe()
        self._read, writing = os.pipe()

        command = [executable() or NAMES[0], "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
                   "--disable-dev-shm-usage", "--remote-debugging-pipe", f"--user-data-dir={folder}",
                   "--force-device-scale-factor=1", "--hide-scrollbars", "about:blank"]  # fmt: skip
        self._log = open(folder / "chromium.log", "wb")  # noqa: SIM115  (closed in __exit__)
        self._process = subprocess.Popen(
            [sys.executable, "-c", FIT, str(reading), str(writing), *command],
            pass_fds=(reading, writing), stdout=self._log, stderr=self._log,
        )  # fmt: skip
        os.close(reading)
        os.close(writing)
        self._numbers, self._held, self.events = itertools.count(1), b"", []
        self._session = ""
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")
        attached = self.send("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *args: object) -> None:
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._write)
        os.close(self._read)
        self._log.close()

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        os.write(
            self._write, json.dumps({"id": number, "method": method, "params": parameters, **session}).encode() + b"\0"
        )
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                raise TimeoutError("no answer from Chromium")
            got = os.read(self._read, 1 << 16)
            if not got:
                raise RuntimeError("Chromium ended")
            self._held += got
        line, self._held = self._held.split(b"\0", 1)
        return json.loads(line)

    def open(self, path: Path, width: int, height: int = 900) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.events.clear()
        self.send("Page.navigate", url=path.as_uri())
        while not any(event.get("method") == "Page.loadEventFired" for event in self.events):
            self.events.append(self._next())

    def ask(self, expression: str) -> Any:
        """The value of an expression of JavaScript, which must be JSON."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        text = {"Enter": "\r", " ": " "}.get(key, "")
        code = {"Enter": 13, " ": 32, "Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key, text=text, windowsVirtualKeyCode=code)

    def shoot(self, path: Path, whole: bool = True, clip: dict[str, float] | None = None) -> None:
        more = {"clip": {**clip, "scale": 1}} if clip else {}
        data = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **more)["data"]
        path.write_bytes(base64.b64decode(data))
