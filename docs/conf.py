"""Configuration of the documentation site: ``sphinx-build -W --keep-going docs build/docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS.parent))

import chrion  # noqa: E402 - of this checkout

project = "Chrion"
author = "Chrion's developers"
version = release = chrion.__version__
html_title = f"Chrion {release}"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["chrion.css"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
copybutton_prompt_text = "$ "  # output is not copied
copybutton_line_continuation_character = "\\"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode", "sphinx_copybutton"]

myst_enable_extensions = ["deflist", "colon_fence"]
myst_heading_anchors = 3

autodoc_member_order = "groupwise"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
suppress_warnings = ["ref.python"]  # the type ``bytes`` is also the name of attributes
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_google_docstring = True
napoleon_numpy_docstring = False


def keep_first_colon(_app: Sphinx, what: str, _name: str, _object: object, _options: object, lines: list[str]) -> None:
    """Break the first line of an attribute after its colon; napoleon would take what precedes it for a type."""
    if what in {"attribute", "data", "property"} and lines and ": " in lines[0]:
        head, rest = lines[0].split(": ", 1)
        lines[:1] = [f"{head}:", rest]


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Make the lists of links on the page of contents those of the site; GitHub would show a toctree as code."""
    if page == app.config.root_doc:
        lists = (Path(app.srcdir) / "contents.md").read_text(encoding="utf-8")
        source[0] += "\n```{toctree}\n:hidden:\n\ncontents\n```\n"
        for caption, links in re.findall(r"^## (.+)\n\n((?:- .+\n)+)", lists, re.MULTILINE):
            pages = re.findall(r"^- \[.+?\]\((\S+)\.md\)", links, re.MULTILINE)
            source[0] += "\n".join(["", "```{toctree}", f":caption: {caption}", ":hidden:", "", *pages, "```", ""])


class DarkPictures(SphinxTransform):
    """Put the dark version of a picture beside it where there is one; the theme shows one of the two."""

    default_priority = 500

    def apply(self, **_: object) -> None:
        """Add the pictures."""
        folder = Path(self.document["source"]).parent
        for picture in list(self.document.findall(nodes.image)):
            dark = picture["uri"].replace(".svg", "-dark.svg")
            if dark != picture["uri"] and (folder / dark).exists():
                other = picture.deepcopy()
                other["uri"] = dark
                picture["classes"].append("only-light")
                other["classes"].append("only-dark")
                picture.parent.insert(picture.parent.index(picture) + 1, other)


def setup(app: Sphinx) -> None:
    """Connect what this file adds to Sphinx."""
    app.add_transform(DarkPictures)
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", keep_first_colon, priority=400)  # before napoleon
