"""Categories of operators, and the marks that distinguish them."""

from __future__ import annotations

from itertools import combinations

import pytest

from chrion.report.categories import (
    BACKGROUND,
    COLOURS,
    COPY_COLOUR,
    DARK_BACKGROUND,
    DARK_COLOURS,
    DARK_COPY_COLOUR,
    DARK_OTHER_COLOUR,
    MAX_CATEGORIES,
    OTHER_COLOUR,
    categorise,
    layer_name,
    mark,
)
from timeline_pages import contrast, linear

LIGHT = (*COLOURS, OTHER_COLOUR, COPY_COLOUR)
DARK = (*DARK_COLOURS, DARK_OTHER_COLOUR, DARK_COPY_COLOUR)


@pytest.mark.parametrize(
    ("operator", "layer"),
    [
        ("LSTM:l3.t17.h", "l3"),
        ("LSTM:l3.t17.h/f2", "l3"),
        ("Squeeze:l11.t0.y/t5", "l11"),
        ("Squeeze:LSTM:l0.t0.h+95/Y/0/t0", "l0"),
        ("encoder/l3.t17/Add", "encoder/l3"),
        ("net/conv.t2d/Relu", "net/conv.t2d"),
        ("/encoder/layer.3/attention/self/MatMul", "encoder/layer.3"),
        ("/layer1/layer1.0/conv1/Conv", "layer1"),
        ("Relu:block1/relu.2", "block1"),
        ("/features/norm/BatchNormalization", "features/norm"),
        ("Conv_12", "Conv"),
        ("MatMul:matmul.2", "matmul"),
        ("gemm_input_reshape_token_86", "gemm_input_reshape_token"),
        ("Add", "Add"),
        ("12", "12"),
        (".5", ".5"),
        ("/", "/"),
        ("a:", "a:"),
        ("", ""),
    ],
)
def test_layer_names(operator: str, layer: str) -> None:
    """Time steps, numbers of unnamed nodes and the components of a layer are dropped; a name is never lost."""
    assert layer_name(operator) == layer


def test_categories_by_weight_and_by_appearance() -> None:
    """Types are listed by weight, layers in their order; shares add up to one."""
    labels, weights = ["a", "b", "a", "c"], [1.0, 5.0, 2.0, 2.0]
    found = categorise(labels, weights, by_weight=True)
    assert (found.names, found.of_operator) == (("b", "a", "c"), (1, 0, 1, 2))
    assert found.shares == pytest.approx((0.5, 0.3, 0.2))
    assert categorise(labels, weights, by_weight=False).names == ("a", "b", "c")
    assert found.of_segment([0, 1], weights) == 0
    assert found.of_segment([0, 2, 3], weights) == 1


def test_the_lightest_labels_share_the_last_category() -> None:
    """With thirty labels the 21 heaviest keep a category, in order of appearance, and nine share one."""
    labels = [f"l{i}" for i in range(30)]
    found = categorise(labels, [float(i) for i in range(30)], by_weight=False)
    assert found.names == (*labels[9:], "9 others")
    assert found.of_operator == (*[21] * 9, *range(21))
    assert sum(found.shares) == pytest.approx(1.0)


def test_weights_of_zero_are_no_division_by_zero() -> None:
    """Operators that take no time have categories, too."""
    assert categorise(["a", "b"], [0.0, 0.0], by_weight=True).shares == (0.0, 0.0)


def test_marks_are_distinct() -> None:
    """No two categories share a colour and a hatch; the neutral colours belong to no category."""
    marks = [mark(category) for category in range(MAX_CATEGORIES)]
    for light_or_dark in (0, 1):
        assert len({(colours[light_or_dark], colours[2]) for colours in marks}) == MAX_CATEGORIES == 21
    assert mark(MAX_CATEGORIES) == mark(999) == (OTHER_COLOUR, DARK_OTHER_COLOUR, "")
    assert len(set(LIGHT)) == len(set(DARK)) == len(COLOURS) + 2


#: Simulation of full deuteranopia and protanopia on linear RGB (Machado, Oliveira and Fernandes 2009).
DEUTERANOPIA = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
PROTANOPIA = [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]


def lab(rgb: list[float]) -> list[float]:
    """Return CIE L*a*b* (D65) of linear RGB."""
    rows = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = [sum(w * c for w, c in zip(row, rgb, strict=True)) for row in rows]
    ratios = [max(v, 0.0) / white for v, white in zip(xyz, (0.9505, 1.0, 1.089), strict=True)]
    f = [r ** (1 / 3) if r > 0.008856 else 7.787 * r + 16 / 116 for r in ratios]
    return [116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])]


@pytest.mark.parametrize("colours", [LIGHT, DARK], ids=["light", "dark"])
@pytest.mark.parametrize("matrix", [None, DEUTERANOPIA, PROTANOPIA], ids=["normal", "deuteranopia", "protanopia"])
def test_colours_differ_for_colour_blind_readers(matrix: list[list[float]] | None, colours: tuple[str, ...]) -> None:
    """Any two colours are at least 10 apart in L*a*b*, where 2.3 is just noticeable, with and without red or green."""
    seen = {}
    for colour in colours:
        rgb = linear(colour)
        if matrix:
            rgb = [min(1.0, max(0.0, sum(w * c for w, c in zip(row, rgb, strict=True)))) for row in matrix]
        seen[colour] = lab(rgb)
    for first, second in combinations(seen, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen[first], seen[second], strict=True)) ** 0.5
        assert distance >= 10, (first, second, distance)


@pytest.mark.parametrize(("colours", "background"), [(LIGHT, BACKGROUND), (DARK, DARK_BACKGROUND)])
def test_bars_are_visible_on_their_background(colours: tuple[str, ...], background: str) -> None:
    """Each colour has a contrast of at least 3 to its background, as WCAG 2.1 asks of graphics.

    Bars are separated, and hatched, by lines of the colour of the background.
    """
    assert min(contrast(colour, background) for colour in colours) >= 3
