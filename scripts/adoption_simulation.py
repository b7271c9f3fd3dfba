"""Comparisons on live requests by the session's own rules, on simulated latencies and a virtual clock."""

from __future__ import annotations

import random
from dataclasses import dataclass

from chrion.runtime.live_selection import LiveSelection

#: Requests after which a simulation gives up; far more than any comparison takes.
_LIMIT = 20_000
#: Time for which requests are slower after the engine has changed, since threads of the other one spin on, and factor.
_SPIN_S, _SPUN = 0.09, 2.0


@dataclass(frozen=True, slots=True)
class Noise:
    """Variation of latencies, as on a shared machine.

    Attributes:
        deviation: Standard deviation of a latency's logarithm.
        outliers: Share of the requests that take five times longer.
        changes: Probability, at each request, that a neighbour begins or ceases to make both engines slower.
        slowdown: Factor by which it does.
    """

    deviation: float = 0.2
    outliers: float = 0.02
    changes: float = 0.02
    slowdown: float = 1.5


QUIET = Noise(0.0, 0.0, 0.0)


class SimulatedApplication:
    """An application of one caller, which sends each request to the engine that the comparison wants.

    Args:
        plain_ms: Latency of the plain session.
        plan_ms: Latency of the plan.
        seed: Seed of the noise.
        noise: Variation of the latencies.
        pause_s: Pause between two requests.

    Attributes:
        selection: The comparison.
        ended: The comparison, once it has ended.
        diverted: Engine of each request: True for the plan.
        now_s: The virtual time.
        extra_ms: Time that requests have taken longer than they would have on the faster engine.
    """

    def __init__(
        self, plain_ms: float, plan_ms: float, seed: int, noise: Noise = Noise(), pause_s: float = 0.0
    ) -> None:
        self.ended: list[LiveSelection] = []
        self.selection = LiveSelection(object(), self.ended.append, share=0.95)
        self.diverted: list[bool] = []
        self.now_s = self.extra_ms = 0.0
        self._ms = {False: plain_ms, True: plan_ms}
        self._random, self._noise, self._pause_s = random.Random(seed), noise, pause_s  # noqa: S311 - noise
        self._slower = 1.0
        #: End of the last request on each engine.
        self._used_s = dict.fromkeys((False, True), -1.0)

    def serve(self) -> None:
        """Serve requests until an engine is selected.

        Raises:
            RuntimeError: None is.
        """
        while not self.ended:
            if len(self.diverted) >= _LIMIT:
                raise RuntimeError("the comparison does not end")
            self._serve_one()

    def _serve_one(self) -> None:
        pick, noise, diverted = self._random, self._noise, self.selection.diverts
        if pick.random() < noise.changes:
            self._slower = pick.choice([1.0, noise.slowdown])
        factor = self._slower * pick.lognormvariate(0.0, noise.deviation)
        factor *= 5.0 if pick.random() < noise.outliers else 1.0
        if self.now_s - self._used_s[not diverted] < _SPIN_S:
            factor *= _SPUN
        took_ms = self._ms[diverted] * factor
        start_s, self.now_s = self.now_s, self.now_s + took_ms / 1e3
        self.selection.record(start_s, self.now_s, diverted=diverted)
        self.extra_ms += took_ms * (1 - min(self._ms.values()) / self._ms[diverted])
        self.diverted.append(diverted)
        self._used_s[diverted] = self.now_s
        self.now_s += self._pause_s
