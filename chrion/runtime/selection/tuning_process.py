"""The client of the tuning process: starts it, asks for decisions and ends it."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from chrion.runtime.selection.configuration import SessionConfig, config_to_data
from chrion.runtime.selection.helper_process import command, environment

#: Shapes of the inputs by name, for a model with free dimensions; empty for any other model.
NamedShapes = Mapping[str, tuple[int, ...]]

#: An interrupt from the keyboard is sent to all processes of a terminal; this one ignores it, and its parent decides
#: how to react.
_PROGRAM = """import os, signal
signal.signal(signal.SIGINT, signal.SIG_IGN)
if {spare} and hasattr(os, "SCHED_IDLE"):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
elif hasattr(os, "nice"):
    os.nice({niceness})
from chrion.runtime.selection.worker import main
main()
"""
#: Niceness of a process that uses spare time of the cores, where the system has no policy for that, and of one beside
#: work that leaves none: it then has a tenth of a core, or a quarter.
_SPARE_NICENESS, _NICENESS = 10, 5
#: A process that uses spare time of the cores is given up when it has had less than a tenth of a core for some
#: seconds: requests that give way leave it 0.15, and a niceness of 5 gets it a quarter.
_STARVED_AFTER_S, _STARVED_CPU_S = 5.0, 0.5


class StarvedError(Exception):
    """There was too little spare time of the cores for an answer."""


class TuningProcess:
    """A process that makes decisions for one configuration; see :mod:`chrion.runtime.selection.worker`.

    Args:
        config: The session's configuration.
        spare: Use only time of the cores that no other process wants.
        limit_s: Time after which a process that has not answered is ended, in seconds.

    Raises:
        OSError: The process cannot be started.
        TypeError: The configuration cannot be passed to another process.
    """

    def __init__(self, config: SessionConfig, *, spare: bool = False, limit_s: float = 900.0) -> None:
        # In an application that embeds Python, the executable is the application.
        if "py" not in Path(sys.executable or "").name.lower() or getattr(sys, "frozen", False):
            raise OSError(f"no Python interpreter to start: {sys.executable!r}")
        self.spare = spare
        self._limit_s = limit_s
        #: Data that is not sent yet, in parts, so that a model's bytes are not copied.
        self._unsent = config_to_data(config)
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            command(_PROGRAM.format(spare=spare, niceness=_SPARE_NICENESS if spare else _NICENESS)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            creationflags=getattr(subprocess, "BELOW_NORMAL_PRIORITY_CLASS", 0),
        )

    def ask(self, shapes: NamedShapes, *, anew: bool = False, busy: bool = False) -> dict[str, Any]:
        """Return the answer for one set of shapes.

        Args:
            shapes: The shapes.
            anew: Whether to compare the candidates even if a decision is cached.
            busy: As for :meth:`chrion.runtime.selection.worker.Decider.decide`.

        Raises:
            StarvedError: The process was ended because it took too long in the spare time of the cores.
            OSError: The process has ended, or it was ended because it took too long.
            ValueError: The answer is not valid JSON.
        """
        assert self._process.stdin  # noqa: S101 - it is a pipe
        assert self._process.stdout  # noqa: S101
        line, starved, answered = b"", threading.Event(), threading.Event()

        def end_if_starved() -> None:
            before_s = self._cpu_s()
            while not answered.wait(_STARVED_AFTER_S):
                used_s = self._cpu_s()
                if 0.0 <= used_s - before_s < _STARVED_CPU_S:  # a process whose time is not known is not starved
                    starved.set()
                    self._process.kill()
                    return
                before_s = used_s

        limit = threading.Timer(self._limit_s, self._process.kill)  # it may hang, in a driver for example
        watch = [threading.Thread(target=end_if_starved)] if self.spare else []
        for thread in (limit, *watch):
            thread.daemon = True
            thread.start()
        try:
            with suppress(BrokenPipeError):
                for part in (*self._unsent, json.dumps({"shapes": shapes, "anew": anew, "busy": busy}).encode(), b"\n"):
                    self._process.stdin.write(part)
                self._process.stdin.flush()
                self._unsent = ()
                line = self._process.stdout.readline()
        finally:
            limit.cancel()
            answered.set()
        if not line and starved.is_set():
            raise StarvedError
        if not line:
            raise OSError(f"the tuning process ended with status {self._process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _cpu_s(self) -> float:
        """Return the CPU time of the process and of those that it has started, in seconds; infinite if not known."""
        try:
            process = psutil.Process(self._process.pid)
            return float(sum(map(sum, (p.cpu_times()[:4] for p in (process, *process.children(recursive=True))))))
        except psutil.Error:
            return math.inf

    def kill(self) -> None:
        """End the process immediately."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                with suppress(OSError):
                    stream.close()
