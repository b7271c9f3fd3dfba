"""Sections of pages under ``docs/`` that scripts write, between markers; the rest of a page is written by hand.

A section ``NAME`` stands between ``<!-- begin: NAME -->`` and ``<!-- end: NAME -->``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from chrion.errors import OptionError


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first row is its head, and all columns but the first are aligned to the right."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def table_rows(page: str, name: str) -> list[list[str]]:
    """Return the cells of each row of the tables in a section, heads included; none without the section."""
    _, _, rest = page.partition(f"<!-- begin: {name} -->")
    lines = rest.partition(f"<!-- end: {name} -->")[0].splitlines()
    return [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in lines if line.startswith("| ")]


def fill_sections(page: str, contents: Mapping[str, str]) -> str:
    """Return the page with its sections replaced; contents for which it has no section are left out.

    Args:
        page: The text of the page.
        contents: Contents by the section's name.

    Raises:
        OptionError: The page has none of the sections, or one of them twice.
    """
    present = [name for name in contents if f"<!-- begin: {name} -->" in page]
    if not present:
        raise OptionError(f"page: no section to fill; expected the markers of {' or '.join(contents)}")
    for name in present:
        page = replace_section(page, name, contents[name])
    return page


def replace_section(page: str, name: str, content: str) -> str:
    """Return the page with the section ``name`` replaced.

    Raises:
        OptionError: The page does not have each of the section's markers exactly once.
    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise OptionError(f"page: expected {begin} and {end} once each")
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"
