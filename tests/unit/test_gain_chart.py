"""The chart of gains: its data and its pictures."""

from __future__ import annotations

import json
import re

import gain_chart
import pytest


def test_a_later_table_replaces_rows() -> None:
    """Models are sorted by ratio, and a model that was measured again has its later ratio."""
    columns = ["model", "ratio", "90 %"]
    first = {"columns": columns, "rows": [["b", "1.00", "0.98 to 1.01"], ["a", "**0.80**", "0.79 to 0.81"]]}
    later = {"columns": columns, "rows": [["b", "**0.70**", "0.6 to 0.75"]]}
    found = gain_chart.gains([{"text": "x"}, first, later])
    assert [(row["model"], row["ratio"], row["interval"]) for row in found] == [
        ("b", 0.7, [0.6, 0.75]),
        ("a", 0.8, [0.79, 0.81]),
    ]


@pytest.mark.parametrize("name", gain_chart.THEMES)
def test_the_pictures_show_the_data(name: str) -> None:
    """Each picture has the models and ratios of the data file, one bar a model, those without a gain included."""
    content = json.loads((gain_chart.DATA / "gain.json").read_bytes())
    picture = (gain_chart.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
    assert picture == gain_chart.draw(content, gain_chart.THEMES[name])
    assert len(re.findall("<rect", picture)) == len(content["models"])
    assert any(row["ratio"] >= 1 for row in content["models"])


def test_the_data_are_those_of_the_results() -> None:
    """The chart has the ratios of the table of results."""
    content = json.loads((gain_chart.DATA / "gain.json").read_bytes())
    assert content["models"] == gain_chart.gains(gain_chart.read_parts(gain_chart.DATA, "cpu"))
