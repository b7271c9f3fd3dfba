"""A browser without a window that tests drive by the Chrome DevTools Protocol."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), ""
)
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-extensions", "--no-first-run")


class Page:
    """An open page.

    Args:
        commands: Pipe to the browser.
        answers: Pipe from it.
        url: Address of the page.
    """

    def __init__(self, commands: IO[bytes], answers: IO[bytes], url: str) -> None:
        self._commands, self._answers = commands, answers
        self._numbers = itertools.count(1)
        self._session = ""
        target = self._call("Target.createTarget", url=url)["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def go(self, url: str) -> None:
        """Open another page in place of this one."""
        self._call("Page.navigate", url=url)

    def value(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, as JSON has it."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def emulate(self, width: int, height: int = 900, *, dark: bool = False) -> None:
        """Give the page a size in CSS pixels, and the reader's preference for light or dark colours."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        preference = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[preference])

    def wait_for(self, expression: str, seconds: float = 60.0) -> Any:
        """Return the value of an expression as soon as it is true.

        Raises:
            AssertionError: It is not in the given time.
        """
        end = time.monotonic() + seconds
        while not (found := self.value(expression)):
            assert time.monotonic() < end, f"not true: {expression}"
            time.sleep(0.1)
        return found

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and return its result; events in between are ignored."""
        number = next(self._numbers)
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": number, "method": method, "params": parameters, **session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == number:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result

    def _read(self) -> bytes:
        """Return the next message, which a zero byte ends."""
        content = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            content += byte
        return bytes(content)


@contextlib.contextmanager
def browse(url: str, folder: Path) -> Iterator[Page]:
    """Open a page in a browser, which is closed afterwards.

    Args:
        url: Address of the page.
        folder: An empty folder for the browser's profile.
    """
    to_browser, commands = os.pipe()
    answers, from_browser = os.pipe()
    # The protocol's pipes are the file descriptors 3 and 4.
    script = f'exec "$@" 3<&{to_browser} 4>&{from_browser}'
    command = ["bash", "-c", script, "bash", CHROMIUM, *_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}"]
    process = subprocess.Popen(  # noqa: S603 - chromium
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=(to_browser, from_browser),
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(to_browser)
    os.close(from_browser)
    with open(commands, "wb") as writer, open(answers, "rb") as reader:  # noqa: PTH123 - file descriptors
        try:
            yield Page(writer, reader, url)
        finally:
            process.kill()
            process.wait()
