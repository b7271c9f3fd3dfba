"""Options of a plan: they are checked when they are created, before anything is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING

from chrion.common.units import parse_duration_ms, parse_size_mb
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.scheduler.limits import Limits
from chrion.scheduler.priced_memory import check_memory

if TYPE_CHECKING:
    from chrion.scheduler.policies.policy import Policy
    from chrion.scheduler.policies.stages import StageMeter

DEFAULT_POLICY = "chrion"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of :func:`chrion.partition`, which describes them.

    Raises:
        OptionError: The SLO, alpha, policy, budget, number of cores or streams, or kind of memory is invalid, a
            package that the policy needs is missing, or ``meter`` is given for a policy that measures no stages.
    """

    slo: str | float | None = None
    alpha: float | None = None
    policy: str = DEFAULT_POLICY
    cores: int | None = None
    streams: int | None = None
    meter: StageMeter | None = None
    gpu_budget: str | float | None = None
    memory: str | None = None

    def __post_init__(self) -> None:
        check_memory(self.memory)
        if self.alpha is not None and not (isinstance(self.alpha, Real) and 0 <= self.alpha < math.inf):
            raise wrong_value("alpha", "a number of ms per MB, 0 or more", self.alpha)
        for what, number in (("cores", self.cores), ("streams", self.streams)):
            if number is not None and number < 1:
                raise wrong_value(what, "1 or more", number)
        if self.policy != DEFAULT_POLICY or self.meter is not None:
            self._check_policy()
        _ = self.limits  # checks them

    def _check_policy(self) -> None:
        from chrion.scheduler.policies.registry import POLICIES, find_policy  # noqa: PLC0415 - sessions do not need it

        policy = find_policy(self.policy)
        if policy.require:
            policy.require()
        if self.meter is not None and not _measures_stages(policy):
            able = " or ".join(name for name, other in POLICIES.items() if _measures_stages(other))
            raise OptionError(f"policy {self.policy} measures no stages", hint=f"choose policy {able}")

    @property
    def limits(self) -> Limits:
        """The SLO in ms, and the budget in MB."""
        return Limits(
            None if self.slo is None else parse_duration_ms(self.slo, "slo"),
            None if self.gpu_budget is None else parse_size_mb(self.gpu_budget, "gpu_budget"),
        )


def _measures_stages(policy: Policy) -> bool:
    return getattr(policy, "measures_stages", False)
