"""What runs of fine-tuning found, and which of its aims hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

#: A returned model does harm if it loses so much AUC, in points, or gains so much log loss, times 100.
HARM_AUC, HARM_LOSS = -0.1, 0.1
#: The methods beside the tuned model, in the order of the table; an aim compares it with the first three.
BASELINES = ("refit", "continued", "new rows only", "old and new rows")
#: The columns of the table of networks.
_NETWORKS = ("softened", "L1", "L1, softened", "L2", "L2, as trees", "L3", "L4", "TabM")
_COMPARED = BASELINES[:3]


@dataclass(frozen=True, slots=True)
class Gain:
    """A difference from the original on later rows, in points of AUC, and in log loss times 100."""

    auc: float
    loss: float


@dataclass(frozen=True, slots=True)
class Seconds:
    """The times of a run, of the processor.

    Attributes:
        fit: From the rows to fit in memory to fitted leaves (L1), with the ridge that was chosen.
        refit: Of ``Booster.refit`` of LightGBM with as many trees and the same rows.
        choice: Of the fits for each ridge and the last one, for leaves that are found.
        whole: Of the whole command, without other methods: model, encoders, tables, new trees, and the comparison.
    """

    fit: float = 1.0
    refit: float = 1.0
    choice: float = 1.0
    whole: float = 1.0


@dataclass(frozen=True, slots=True)
class Run:
    """One run."""

    #: Whether later rows differ from old ones, and whether the pipeline has target encoders.
    drifts: bool
    encoded: bool
    adopted: bool
    returned: Gain
    #: Of the tuned model, adopted or not, and of each other method.
    methods: Mapping[str, Gain] = field(default_factory=dict)
    seconds: Seconds = Seconds()
    #: The latency of the returned model, relative to that of the original.
    latency: float = 1.0
    #: The share of later rows with the class that its leaves have in float64.
    equal: float = 1.0

    @property
    def harm(self) -> bool:
        """Whether the returned model is worse than the original."""
        return self.returned.auc < HARM_AUC or self.returned.loss > HARM_LOSS

    @property
    def best(self) -> float | None:
        """The largest gain in AUC of the methods that the tuned model is compared with."""
        return max((self.methods[name].auc for name in _COMPARED if name in self.methods), default=None)


@dataclass(frozen=True, slots=True)
class Aim:
    """An aim, what was found, and whether it holds."""

    text: str
    found: str
    holds: bool


def rows_of(results: Mapping[str, Sequence[Run]]) -> list[list[str]]:
    """Return the rows of the table of gains, the head first."""
    present = {method for runs in results.values() for run in runs for method in run.methods}
    names = ["tuned", *(name for name in BASELINES if name in present)]
    rows = [["data", "adopted", "AUC", "log loss", "harm", *names]]
    for name, runs in results.items():
        auc, loss = mean(r.returned.auc for r in runs), mean(r.returned.loss for r in runs)
        adopted = f"{sum(r.adopted for r in runs)} of {len(runs)}"
        cells = [name, adopted, f"{auc:+.1f}", f"{loss:+.1f}", str(sum(r.harm for r in runs))]
        rows.append([*cells, *(_method(runs, method) for method in names)])
    return rows


def network_rows(results: Mapping[str, Sequence[Mapping[str, Gain]]]) -> list[list[str]]:
    """Return the rows of the table of networks, the head first."""
    return [["data", *_NETWORKS], *([name, *(_mean(own, n) for n in _NETWORKS)] for name, own in results.items())]


def _method(runs: Sequence[Run], method: str) -> str:
    return _mean([r.methods for r in runs], method)


def _mean(runs: Sequence[Mapping[str, Gain]], method: str) -> str:
    found = [methods[method] for methods in runs if method in methods]
    return f"{mean(g.auc for g in found):+.1f} / {mean(g.loss for g in found):+.1f}" if found else ""


def aims_of(results: Mapping[str, Sequence[Run]]) -> list[Aim]:
    """Return the aims of fine-tuning, and which of them hold."""
    runs = [r for own in results.values() for r in own]
    return [*_harm(runs), *_gains(runs), *_costs(runs)]


def _harm(runs: Sequence[Run]) -> list[Aim]:
    aims = []
    for text, allowed, drifts in (
        ("harm in at most 5 % of the runs with drift", 0.05, True),
        ("no harm without drift", 0.0, False),
    ):
        own = [r for r in runs if r.drifts == drifts]
        harmed = sum(r.harm for r in own)
        if own:
            aims.append(Aim(text, f"{harmed} of {len(own)}", harmed <= allowed * len(own)))
    return aims


def _gains(runs: Sequence[Run]) -> list[Aim]:
    aims = []
    compared = [(r, r.best) for r in runs if r.best is not None]
    for text, gains in (
        ("tuned", [best - r.methods["tuned"].auc for r, best in compared]),
        ("returned", [best - r.returned.auc for r, best in compared]),
    ):
        if gains:
            what = f"AUC of the {text} model at least the best of {', '.join(_COMPARED)}, less 0.2 points, on average"
            aims.append(Aim(what, f"less {mean(gains):.2f}", mean(gains) <= 0.2))
    encoded = [r for r in runs if r.encoded and r.drifts and "old and new rows" in r.methods]
    retrained = sum(r.methods["old and new rows"].auc for r in encoded)
    for text, gained in (
        ("tuned", [r.methods["tuned"].auc for r in encoded]),
        ("returned", [r.returned.auc for r in encoded]),
    ):
        if retrained > 0:
            share = sum(gained) / retrained
            what = f"with encoders, 75 % of the gain of retraining on old and new rows: {text} model"
            aims.append(Aim(what, f"{100 * share:.0f} %", share >= 0.75))
    return aims


def _costs(runs: Sequence[Run]) -> list[Aim]:
    if not runs:
        return []
    ratio = median(r.seconds.fit / r.seconds.refit for r in runs)
    choice = median(r.seconds.choice / r.seconds.refit for r in runs)
    whole, seconds = median(r.seconds.whole / r.seconds.refit for r in runs), median(r.seconds.whole for r in runs)
    times = (
        f"{ratio:.1f} times; to choose the ridge {choice:.0f}, the whole command {whole:.0f} times ({seconds:.1f} s)"
    )
    equal = min(r.equal for r in runs)
    latency = median([r.latency for r in runs if r.adopted] or [1.0]) - 1
    return [
        Aim("leaves fitted (L1) in at most twice the time of LightGBM's refit", times, ratio <= 2),
        Aim("the class of 99.9 % of the rows is that of their leaves", f"{100 * equal:.2f} %", equal >= 0.999),
        Aim("latency within 3 %", f"{100 * latency:+.1f} %", abs(latency) <= 0.03),
    ]
