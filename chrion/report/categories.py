"""Categories of operators, by type or by layer, and the colours and hatches that distinguish them in pictures.

There are seven colours for a white background and seven for a dark one; the latter are those of Okabe and Ito ("Color
Universal Design", 2008) without black. Each has a contrast of at least 3:1 to its background, as WCAG 2.1 asks of
graphics (criterion 1.4.11), and readers with a common form of colour blindness can tell them apart. Colours repeat with
another hatch, in the colour of the background, when they run out, so 21 categories have marks of their own; the
remaining ones share the neutral colour.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

#: Colours on white, in the order in which categories take them.
COLOURS = ("#1A5FB4", "#B58900", "#006D45", "#D45D94", "#2F97C8", "#A12C00", "#4B2A85")
#: Colours on :data:`DARK_BACKGROUND`.
DARK_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442")
BACKGROUND, DARK_BACKGROUND = "#FFFFFF", "#15181D"
#: Hatches, as matplotlib names them; every colour is used with the first before any is used with the second.
HATCHES = ("", "////", "....")
#: The colour of the categories that share one mark, and of copies.
OTHER_COLOUR, COPY_COLOUR = "#6E6E6E", "#444444"
DARK_OTHER_COLOUR, DARK_COPY_COLOUR = "#7A7A7A", "#DADADA"
#: Categories with marks of their own.
MAX_CATEGORIES = len(COLOURS) * len(HATCHES)

#: The prefix of the names that unnamed nodes get when a model is loaded: ``Conv:``, followed by the output's name.
_TYPE_PREFIX = re.compile(r"^(?:\w+:(?=.))+")
_NUMBER = re.compile(r"[._]?\d+$")
#: The time step in a component of a name, and what follows it.
_STEP = re.compile(r"(?<=.)\.t\d+(\..*)?$")


@dataclass(frozen=True, slots=True)
class Categories:
    """A division of operators into named categories."""

    #: Names in legend order.
    names: tuple[str, ...]
    #: Index of each operator's category in ``names``.
    of_operator: tuple[int, ...]
    #: Share of the total weight, 0 to 1, by category.
    shares: tuple[float, ...]

    def of_segment(self, segment: Sequence[int], weights: Sequence[float]) -> int:
        """Return the category with the greatest weight in a segment; the first of several equal ones."""
        sums: dict[int, float] = {}
        for i in segment:
            sums[self.of_operator[i]] = sums.get(self.of_operator[i], 0.0) + weights[i]
        return max(sums, key=lambda category: sums[category])


def categorise(labels: Sequence[str], weights: Sequence[float], *, by_weight: bool) -> Categories:
    """Divide operators by their labels.

    Args:
        labels: The label of each operator.
        weights: The weight of each operator, for example its time in ms.
        by_weight: List the heaviest category first; otherwise categories keep their order of appearance.

    Returns:
        At most :data:`MAX_CATEGORIES` categories, and one more for all remaining labels if there are any.
    """
    totals: dict[str, float] = {}
    for label, weight in zip(labels, weights, strict=True):
        totals[label] = totals.get(label, 0.0) + weight
    ranked = sorted(totals, key=lambda label: -totals[label])
    named = set(ranked[:MAX_CATEGORIES])
    names = [label for label in (ranked if by_weight else totals) if label in named]
    index = {label: at for at, label in enumerate(names)}
    remaining = len(totals) - len(named)
    if remaining:
        names.append(f"{remaining} others")
        index |= dict.fromkeys(totals.keys() - named, len(named))
    of_operator = tuple(index[label] for label in labels)
    sums = [0.0] * len(names)
    for category, weight in zip(of_operator, weights, strict=True):
        sums[category] += weight
    total = sum(sums) or 1.0
    return Categories(tuple(names), of_operator, tuple(value / total for value in sums))


def mark(category: int) -> tuple[str, str, str]:
    """Return the colour on white, the colour on the dark background, and the hatch for a category's index."""
    if category >= MAX_CATEGORIES:
        return OTHER_COLOUR, DARK_OTHER_COLOUR, ""
    at = category % len(COLOURS)
    return COLOURS[at], DARK_COLOURS[at], HATCHES[category // len(COLOURS)]


def layer_name(operator: str) -> str:
    """Return the layer that an operator belongs to, according to its name.

    The path of a name such as ``/encoder/layer.3/attention/MatMul`` ends at its first numbered component:
    ``encoder/layer.3``. Time steps are dropped: ``LSTM:l3.t17.h`` and its chunk ``LSTM:l3.t17.h/f2`` belong to ``l3``.
    Without a path, numbers are dropped too: ``Conv_12`` belongs to ``Conv``.
    """
    path = [part for part in _TYPE_PREFIX.sub("", operator).split("/") if part]
    if not path:
        return operator
    if len(path) == 1:
        stem = path[0].split(".")[0]
        return (stem if stem != path[0] else _NUMBER.sub("", stem)) or operator
    folders = [_STEP.sub("", folder) for folder in path[:-1]]
    numbered = (at for at, part in enumerate(folders, start=1) if any(char.isdigit() for char in part))
    return "/".join(folders[: next(numbered, len(folders))])
