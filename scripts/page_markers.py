"""Pages under ``docs/`` that a script writes parts of, and people the rest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from chrion.errors import OptionError


def markdown_table(rows: Iterable[Sequence[str]]) -> str:
    """A table; the first row is its head."""
    head, *body = rows
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def fill_sections(page: str, contents: Mapping[str, str]) -> str:
    """The page with each of the contents that it has markers for put between them.

    Raises:
        OptionError: It has none of the markers, or one twice.
    """
    wanted = [name for name in contents if f"<!-- begin: {name} -->" in page]
    if not wanted:
        raise OptionError(f"page: it must hold the markers of {' or '.join(contents)}")
    for name in wanted:
        page = replace_section(page, name, contents[name])
    return page


def replace_section(page: str, name: str, content: str) -> str:
    """The page with what stands between the markers of ``name`` replaced.

    Raises:
        OptionError: It has not one of each.
    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    if page.count(begin) != 1 or page.count(end) != 1:
        raise OptionError(f"page: it must hold {begin} and {end} once each")
    head, rest = page.split(begin)
    return f"{head}{begin}\n\n{content}\n\n{end}{rest.split(end)[1]}"
