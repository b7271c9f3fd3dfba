"""Draw the architecture: ``docs/img/architecture.svg`` and ``docs/img/architecture-dark.svg``.

python scripts/architecture_picture.py
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from gain_chart import PICTURES, THEMES, Theme

from chrion.common.files import write_atomically

WIDTH, HEIGHT = 760, 352
TITLE = "From a model to a HybridSession: graph, profile and plan, then segments on lanes"


@dataclass(frozen=True)
class Box:
    """A box with a title and lines of text below it."""

    x: int
    y: int
    width: int
    height: int
    title: str
    lines: Sequence[str] = ()
    strong: bool = False


BOXES = (
    Box(0, 34, 130, 74, "graph", ("operators, weights,", "chunks of layers")),
    Box(158, 34, 130, 74, "profile", ("costs on each device,", "copies, handoffs")),
    Box(316, 34, 150, 74, "scheduler", ("order, lane, width;", "latency against memory")),
    Box(494, 34, 118, 74, "plan", ("segments of lanes", "in a JSON file")),
    Box(640, 34, 120, 74, "simulator", ("servers, SLO,", "swapping")),
    Box(0, 158, 760, 130, "HybridSession", (), strong=True),
    Box(16, 190, 144, 84, "guard", ("times plans and", "plain sessions,", "keeps the fastest")),
    Box(192, 190, 330, 84, "a plan on lanes"),
    Box(538, 190, 98, 84, "plain session", ("InferenceSession", "of the model")),
    Box(648, 190, 98, 84, "one thread", ("for many callers", "and busy cores")),
    Box(0, 310, 240, 40, "your program: run(inputs)"),
    Box(260, 310, 240, 40, "chrion serve: REST, gRPC, OpenAI"),
    Box(520, 310, 240, 40, "libraries: optimum, transformers"),
)
#: Lines between boxes: from, to.
ARROWS = (
    *(((x, 71), (x + 28, 71)) for x in (130, 288, 466, 612)),
    ((553, 108), (553, 158)),
    ((160, 232), (192, 232)),
    *(((x, 310), (x, 288)) for x in (120, 380, 640)),
)
#: Bars of the lanes: lane, from, to.
LANES = ("gpu0", "cpu1", "cpu2")
BARS = ((0, 0, 90), (0, 150, 215), (1, 40, 130), (1, 160, 240), (2, 95, 180))


def draw(theme: Theme) -> str:
    """Return the picture."""
    lines = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-2 0 {WIDTH + 4} {HEIGHT}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12">'
        ),
        f"<title>{TITLE}</title>",
        (
            f'<defs><marker id="head" markerWidth="8" markerHeight="8" refX="6" refY="3" orient="auto">'
            f'<path d="M0 0L6 3L0 6z" fill="{theme.faint}"/></marker></defs>'
        ),
        _text(0, 20, "once for a model and a machine; by default in the background", theme.faint),
        _text(0, 146, "for each request", theme.faint),
    ]
    for box in BOXES:
        lines += _box(box, theme)
    for (x, y), (to_x, to_y) in ARROWS:
        lines.append(
            f'<path d="M{x} {y}L{to_x} {to_y}" stroke="{theme.faint}" stroke-width="1.5" marker-end="url(#head)"/>'
        )
    lines += _lanes(204, 216, theme)
    return "\n".join([*lines, "</svg>\n"])


def _box(box: Box, theme: Theme) -> list[str]:
    """Return the frame and the text of a box."""
    colour = theme.gain if box.strong else theme.faint
    middle = box.x + box.width / 2
    single = not box.lines and not box.strong and box.height < 60
    top = box.y + (box.height / 2 + 4 if single else 19)
    return [
        (
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" fill="none" '
            f'stroke="{colour}" stroke-width="{2 if box.strong else 1.2}"/>'
        ),
        _text(middle, top, box.title, theme.text, extra='text-anchor="middle" font-weight="600"'),
        *(
            _text(middle, top + 18 + 16 * at, line, theme.faint, extra='text-anchor="middle" font-size="11"')
            for at, line in enumerate(box.lines)
        ),
    ]


def _lanes(x: int, y: int, theme: Theme) -> list[str]:
    """Return three lanes with segments."""
    lines = [_text(x, y + 12 + 18 * at, name, theme.faint) for at, name in enumerate(LANES)]
    for lane, start, end in BARS:
        colour = theme.gain if lane == 0 else theme.plain
        lines.append(
            f'<rect x="{x + 40 + start}" y="{y + 18 * lane + 1}" width="{end - start}" height="13" rx="2" '
            f'fill="{colour}"/>'
        )
    return lines


def _text(x: float, y: float, text: str, colour: str, *, extra: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" {extra}>{text}</text>'


def main() -> None:
    """Draw the pictures."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, theme in THEMES.items():
        write_atomically(PICTURES / f"{name.replace('gain', 'architecture')}.svg", draw(theme).encode())


if __name__ == "__main__":
    main()
