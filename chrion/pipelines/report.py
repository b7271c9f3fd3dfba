"""The report of a fine-tuning: what was fitted, what it was compared with, and what was decided."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from chrion.pipelines.encoders import Prior
from chrion.pipelines.measures import Differences, Interval, Measures


@dataclass(frozen=True, slots=True)
class ComparedModel:
    """A model that is compared on the held-out rows."""

    name: str
    #: None if the model could not be made.
    measures: Measures | None
    #: Why it could not be made.
    note: str = ""
    #: By how much its measures exceed the original's; None for the original.
    difference: Differences | None = None


@dataclass(frozen=True, slots=True)
class FinetuningReport:
    """What a fine-tuning found on held-out rows."""

    #: True if the tuned model is returned, false if the original is.
    adopted: bool
    #: Why.
    reason: str
    #: The rows that leaves were fitted on, those that the ridge was chosen with, and the held-out ones.
    rows: tuple[int, int, int]
    #: The names of the two measures: a gain, which is better if larger, and a loss.
    measures: tuple[str, str]
    #: How much the tuned model differs from the original in both measures, on average over all times.
    gain: Interval
    loss: Interval
    #: The share of a class in earlier and held-out rows, if it differs beyond chance.
    prior_shift: tuple[float, float] | None
    #: The original and the tuned model, and other methods.
    compared: tuple[ComparedModel, ...]
    #: The time without that of other methods.
    seconds: float
    #: What was tuned: ``L1`` for leaves, ``L2`` to ``L4`` in a differentiable network, also if a linear model is kept.
    level: str = "L1"
    #: The weight of the ridge, in rows; None if no leaves were fitted.
    ridge: float | None = None
    #: What counts beside new rows in each table of a target encoder, None if it stays; empty if no table was updated.
    priors: tuple[Prior | None, ...] = ()
    #: The trees that were appended.
    trees: int = 0
    #: The epochs that a network was trained for, and the losses after each epoch: of the rows to fit while training,
    #: and of the rows to choose with.
    epochs: int = 0
    curve: tuple[tuple[float, float], ...] = ()
    #: How many times as long as the original a network takes for one row, and for a thousand; None for trees.
    cost: tuple[float, float] | None = None
    #: Whether a keyboard interrupt ended the tuning, or the comparison with other methods.
    interrupted: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON-compatible data."""
        return asdict(self)

    @property
    def shift_line(self) -> str:
        """A sentence on prior shift; empty if there is none."""
        if self.prior_shift is None:
            return ""
        before, after = (f"{100 * share:.1f} %" for share in self.prior_shift)
        return f"prior shift: {before} of the earlier rows and {after} of the held-out rows are of one class"

    @property
    def better_line(self) -> str:
        """A sentence on what else is better than the tuned model on the last rows; empty if nothing is."""
        measures = {own.name: own.measures for own in self.compared if own.measures}
        tuned = measures.get("tuned")
        better = [name for name, own in measures.items() if name != "original" and tuned and own.beats(tuned)]
        line = "better than the tuned model in both measures on these rows, but not proven or not a candidate"
        return f"{line}: {', '.join(better)}" if better else ""

    @property
    def calibration_line(self) -> str:
        """A sentence on probabilities that are less calibrated than the original's; empty if they are not."""
        errors = {own.name: own.measures.calibration for own in self.compared if own.measures}
        old, new = (round(errors.get(name) or 0.0, 4) for name in ("original", "tuned"))
        worse = self.adopted and new > old
        return f"probabilities are less calibrated than before: error {new:.4f}, {old:.4f} before" if worse else ""

    @property
    def cost_line(self) -> str:
        """A sentence on the latency of a network; empty for trees."""
        if self.cost is None:
            return ""
        one, many = (f"{ratio:.3g}" for ratio in self.cost)
        return f"cost of the differentiable form: {one} times the original's latency for 1 row, {many} for 1000"
