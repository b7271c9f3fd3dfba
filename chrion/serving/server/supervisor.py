"""A supervisor: a process that starts the server again if it crashes.

The server's standard input is a pipe whose other end only the supervisor has. If the supervisor ends without stopping
the server, because it was killed for example, the server finds the end of the pipe and stops as for SIGTERM. Otherwise
it would go on without one, and keep the ports from the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

log = logging.getLogger("chrion.server")

#: Exit codes with which the server ends on purpose: it was stopped, or an option is wrong.
_FINAL = (0, 2)
#: Time before a restart, the first one and the maximum, in seconds; it doubles with every crash. A server that crashes
#: at once must not use up a core.
_FIRST_S, _MAX_DELAY_S = 0.5, 30.0
#: Time after which a server counts as started, so that the next crash is a first one: twice the maximum pause.
_STABLE_S = 60.0
#: Steps of a pause: a signal ends it after one of them, since ``time.sleep`` continues after the handler of a signal.
_STEP_S = 0.1
#: The environment variable by which a server knows that its standard input is the pipe.
_SUPERVISED = "CHRION_SUPERVISED"


class Supervisor:
    """Runs a server until it ends on purpose.

    Args:
        command: The command of the server.
        sleep: Waits for some seconds; tests replace it.
    """

    def __init__(self, command: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> None:
        self._command = list(command)
        self._sleep = sleep
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = False

    def run(self) -> int:
        """Run the server, again after each crash; return its exit code. SIGTERM and SIGINT end the server."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        delay_s = _FIRST_S
        while True:
            began = time.monotonic()
            environment = os.environ | {_SUPERVISED: "1"}
            self._child = subprocess.Popen(self._command, stdin=subprocess.PIPE, env=environment)  # noqa: S603 - our own
            if self._stopping:  # the signal arrived before there was a child
                self._child.send_signal(signal.SIGTERM)
            code = self._child.wait()
            if self._child.stdin:
                self._child.stdin.close()
            if code in _FINAL or self._stopping:
                starting = self._stopping and code == -signal.SIGTERM  # it does not handle the signal yet
                return 0 if starting else code if code >= 0 else 1
            if time.monotonic() - began > _STABLE_S:
                delay_s = _FIRST_S
            log.error("server crashed", extra={"fields": {"exit_code": code, "restart_s": delay_s}})
            self._pause(delay_s)
            delay_s = min(2 * delay_s, _MAX_DELAY_S)
            if self._stopping:
                return 0

    def _pause(self, seconds: float) -> None:
        """Wait for some seconds, or until the server is to stop."""
        for _ in range(round(seconds / _STEP_S)):
            if self._stopping:
                return
            self._sleep(_STEP_S)

    def _stop(self, *_: object) -> None:
        self._stopping = True
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGTERM)


def call_when_gone(stop: Callable[[], None]) -> None:
    """Call a function in the event loop when the supervisor of this process has ended; never if it has none."""
    if not os.environ.pop(_SUPERVISED, ""):  # not for processes that this one starts
        return
    loop, pipe = asyncio.get_running_loop(), sys.stdin.fileno()

    def read() -> None:
        if not os.read(pipe, 1):
            loop.remove_reader(pipe)
            log.warning("the supervisor has ended")
            stop()

    loop.add_reader(pipe, read)


def server_command(arguments: Sequence[str], option: str) -> list[str]:
    """Return the command of the server: this one without the option that asks for a supervisor."""
    return [sys.executable, "-m", "chrion", *(argument for argument in arguments if argument != option)]
