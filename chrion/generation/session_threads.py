"""Sessions for several threads, their own threads, and the cores that an iteration runs on.

The thread that calls a session takes part in its operators, beside the session's own threads. Those sleep between
iterations, and the system may wake one of them on the core of the caller. The two then take turns there for tens of
milliseconds, with another core idle: on two cores every other request of a small model took 1.5 to 2.5 times as long.
So the thread that runs the iterations of a generator has a core of its own, and each of the others has another one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnxruntime as ort

from chrion.devices import CPU_PROVIDER, Device
from chrion.devices.intra_op import pin_threads
from chrion.errors import ModelError
from chrion.graph.ort_sessions import first_line
from chrion.machine.core_leases import lease_cores
from chrion.machine.cores import affinity

#: Session options. Between two operators a thread waits for the next one for a short time, in which its core does
#: nothing else, because a thread that sleeps takes longer to wake up than a small operator to run.
SPINNING = {
    "session.intra_op.allow_spinning": "1",
    "session.intra_op.spin_duration_us": "50",
    "session.force_spinning_stop": "1",
}
#: Options of a session that runs again as soon as tokens have been chosen: its threads wait for that long. Longer waits
#: gain nothing on idle cores, and cost more beside busy processes.
SPINNING_BETWEEN_CALLS = {"session.intra_op.spin_duration_us": "100", "session.force_spinning_stop": "0"}


@dataclass(frozen=True)
class SessionThreads:
    """The threads of a session.

    Args:
        count: Their number, with the caller.
        cores: The logical CPU of each thread but the caller, or none if the system chooses.
    """

    count: int
    cores: tuple[int, ...] = ()

    def options(self, configuration: Mapping[str, str]) -> ort.SessionOptions:
        """Return options of a session, with entries of its configuration."""
        options = ort.SessionOptions()
        options.intra_op_num_threads = self.count
        options.log_severity_level = 3
        for key, value in {**SPINNING, **configuration}.items():
            options.add_session_config_entry(key, value)
        if self.cores:
            pin_threads(options, self.cores)
        return options


class IterationCores:
    """Leased cores of the threads that run iterations.

    Attributes:
        caller: The logical CPU of the thread that calls the sessions.
        others: Those of the sessions' own threads.
    """

    def __init__(self, threads: int) -> None:
        first = lease_cores(1)
        further = lease_cores(threads, further=True)  # one too many, since one of them may be the caller's
        self._leases = (first, further)
        (self.caller,) = first.cores
        self.others = tuple(core for core in further.cores if core != self.caller)[: threads - 1]

    def release(self) -> None:
        """Release the cores."""
        for lease in self._leases:
            lease.release()


def lease_iteration_cores(threads: int) -> IterationCores | None:
    """Lease a core for each of several threads; None if there are fewer cores, or if the system cannot pin threads."""
    if threads == 1 or affinity() is None:
        return None
    cores = IterationCores(threads)
    if len(cores.others) == threads - 1:
        return cores
    cores.release()
    return None


_FATAL = 4


class DeviceSession(ort.InferenceSession):  # type: ignore[misc]
    """A session that runs while no other one uses the device, if the provider requires that.

    Two batches in flight use the device from two threads. WebGPU's sessions share one command queue, which is not
    thread-safe.

    Args:
        model: The model or its file.
        options: The options of the session.
        providers: Its execution providers.
    """

    def __init__(self, model: str | bytes, options: ort.SessionOptions, providers: Sequence[str]) -> None:
        super().__init__(model, options, providers=list(providers))
        self._device = Device(next((name for name in providers if name != CPU_PROVIDER), CPU_PROVIDER))

    def run(self, names: Sequence[str] | None, feed: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Run the session."""
        with self._device.exclusive():
            results: list[Any] = super().run(names, feed, options)
        return results


def run_options() -> ort.RunOptions:
    """Return options of runs that can be ended from another thread, by ``terminate``.

    Errors of runs are raised, so onnxruntime does not print them as well.
    """
    options = ort.RunOptions()
    options.log_severity_level = _FATAL
    # The default. onnxruntime 1.31 asks for it before every run with a binding, and raises an exception where it is
    # not set, only to handle it, which takes a tenth of the time of a small model.
    options.add_run_config_entry("gpu_graph_id", "0")
    return options


def open_for_threads(
    name: str, model: str | bytes, options: ort.SessionOptions, providers: Sequence[str]
) -> ort.InferenceSession:
    """Return a session that several threads may run at a time.

    Args:
        name: The name of the model in errors.
        model: The model or its file.
        options: The options of the session.
        providers: Its execution providers.

    Raises:
        ModelError: onnxruntime refuses the model.
    """
    try:
        if all(provider == CPU_PROVIDER for provider in providers):
            return ort.InferenceSession(model, options, providers=list(providers))
        return DeviceSession(model, options, providers)
    except Exception as error:  # onnxruntime raises many types
        raise ModelError(f"{name}: onnxruntime refuses the model: {first_line(error)}") from error
