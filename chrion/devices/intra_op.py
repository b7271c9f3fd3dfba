"""The threads with which a CPU session runs its operators (intra-operator parallelism)."""

from __future__ import annotations

from collections.abc import Sequence

import onnxruntime as ort

#: The longest time that a thread spins for the next part of an operator, in us. Waking it takes longer, so that even
#: where spinning is in vain, it at most doubles the cost of waiting. It outlasts the gaps between the parts of an
#: operator and between most operators: latencies are those of threads that spin during the whole run.
SPIN_US = 20
#: The same for a session that is called in a loop: its threads spin between two calls as well.
_BETWEEN_CALLS_US = 200


def set_threads(options: ort.SessionOptions, width: int, cores: Sequence[int] = (), *, in_a_loop: bool = False) -> None:
    """Give a session ``width`` threads: its caller's, and others that spin for :data:`SPIN_US` at most, then sleep.

    Without any spinning, each part of an operator would wake them: on two cores, an LSTM of 256 cells then takes longer
    than on one. After a run they stop at once, since other lanes may use their cores.

    Args:
        options: Session options, which are changed.
        width: Number of threads, of 1 or more.
        cores: The logical CPUs of the other threads, one each; if there are not that many, the system chooses.
        in_a_loop: The session is called in a loop, to measure it. Its threads spin between calls as well, so that the
            time of a call does not include waking them.
    """
    options.intra_op_num_threads = width
    options.inter_op_num_threads = 1
    if width == 1:
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return
    options.add_session_config_entry("session.intra_op.allow_spinning", "1")
    options.add_session_config_entry(
        "session.intra_op.spin_duration_us", str(_BETWEEN_CALLS_US if in_a_loop else SPIN_US)
    )
    if not in_a_loop:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if len(cores) >= width - 1:
        pin_threads(options, cores[: width - 1])


def pin_threads(options: ort.SessionOptions, cores: Sequence[int]) -> None:
    """Pin each thread of a session, except its caller, which onnxruntime does not pin, to a logical CPU."""
    affinities = ";".join(str(core + 1) for core in cores)  # counted from 1
    options.add_session_config_entry("session.intra_op_thread_affinities", affinities)
