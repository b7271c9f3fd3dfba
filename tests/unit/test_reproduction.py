"""Reproduced tables: the page shows those of the data file, and writing one keeps the others."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from page_markers import table_rows
from reproduce import PICTURES, choose_picture
from reproduction.results import DATA, PAGE, read_tables, record_tables
from reproduction.table7 import figure11

from chrion.errors import OptionError


def test_the_page_shows_the_tables_of_the_data_file() -> None:
    """Every section of the page that has a table has the rows that are stored under its name."""
    text = PAGE.read_text(encoding="utf-8")
    shown = {name: table_rows(text, name) for name in read_tables() if f"<!-- begin: {name} -->" in text}
    assert {"table6", "table7", "opara", "nimble", "ios", "orca simulated"} <= set(shown)
    for name, (head, _, *rows) in shown.items():
        assert [head, *rows] == read_tables()[name], name


def test_a_table_replaces_the_one_of_its_name(tmp_path: Path) -> None:
    """Other tables and sections stay as they are, and tables without a section are stored only."""
    page, data = tmp_path / "page.md", tmp_path / "data.json"
    page.write_text("<!-- begin: a -->\nold\n<!-- end: a -->\n<!-- begin: b -->\nkept\n<!-- end: b -->\n")
    data.write_text(json.dumps({"b": [["kept"]], "a": [["old"]]}))
    record_tables({"a": [["x", "y"], ["1", "—"]], "c": [["z"]]}, page, data)
    assert read_tables(data) == {"a": [["x", "y"], ["1", "—"]], "b": [["kept"]], "c": [["z"]]}
    assert table_rows(page.read_text(), "a") == [["x", "y"], ["---", "---:"], ["1", "—"]]
    assert "kept" in page.read_text()


def test_the_data_file_has_a_line_for_each_row() -> None:
    """A changed row of the stored tables is one changed line."""
    rows = [row for table in read_tables().values() for row in table]
    lines = DATA.read_text(encoding="utf-8").splitlines()
    assert sum(line.startswith("  [") for line in lines) == len(rows)


def test_a_table_needs_no_matplotlib(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Without matplotlib a command names the missing extra and makes its table; a named picture is refused."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert choose_picture(PICTURES / "figure10.png") is None
    assert "chrion[plot]" in capsys.readouterr().err
    with pytest.raises(OptionError, match="matplotlib"):
        choose_picture(Path("curves.png"))
    assert figure11(None, requests=20)["figure11"][0][0] == "model"
