"""Tests that every command and every code block of the documentation can be run, or at least parsed."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest
import typer
from fill_pages import filled_pages
from pages.commands import command_reference
from pages.layers import layer_table
from pages.results import result_sections
from result_files import read_parts

import chrion
from chrion import errors
from chrion.cli.app import app
from chrion.runtime.options.session_options import (
    BASELINE_KEYS,
    BASELINE_OPTIONS,
    INHERITED_KEYS,
    INHERITED_OPTIONS,
    RUN_OPTIONS,
)
from chrion.serving.simulator import find_scenario
from chrion.zoo import build
from code_blocks import PAGES, ROOT, Block, blocks, check_chrion, check_python, commands, matches, run_page
from command_line import Chrion
from layers import LAYERS

BLOCKS = [block for page in PAGES for block in blocks(page)]
#: Pages that run within about a second; tests/process has the others.
QUICK = ("docs/getting-started.md", "docs/generation.md", "docs/hardware.md")
#: Programs that are not part of Chrion.
TOOLS = {"pytest", "ruff", "mypy", "sphinx-build", ".ci/run", "curl", "mkdir", "optimum-cli"}
#: Languages that are neither run nor parsed: output, diagrams, and what Sphinx reads.
SHOWN = {"", "text", "json"}


def test_blocks_are_valid() -> None:
    """Commands have the options that they are given, Python code compiles with existing names, and TOML can be read."""
    assert len(BLOCKS) > 100
    for block in BLOCKS:
        try:
            _check_block(block)
        except Exception as error:
            error.add_note(f"in the block {block}")
            raise


@pytest.mark.parametrize("page", QUICK)
def test_a_page_runs(page: str, cli: Chrion, capfd: pytest.CaptureFixture[str]) -> None:
    """The marked blocks of a page, run in order in one folder, have the documented output."""
    run_page(ROOT / page, cli, capfd)


@pytest.mark.parametrize(
    "block", [b for b in BLOCKS if b.language == "toml" and "models" in tomllib.loads(b.body)], ids=str
)
def test_a_scenario_is_valid(block: Block, tmp_path: Path) -> None:
    """A scenario on a page has only keys that exist, with values that can be simulated."""
    graph = chrion.load(build("lstm", {"layers": 2, "seq": 2}))
    profile = chrion.Profile.load(ROOT / "profiles" / "gtx1080ti-paper.json")
    plan = chrion.partition(graph, profile, policy="heft")
    for name in re.findall(r"\w+\.plan\.json", block.body):
        plan.save(tmp_path / name)
    (tmp_path / "scenario.toml").write_text(block.body, encoding="utf-8")
    assert find_scenario(str(tmp_path / "scenario.toml")).build().models


def test_blocks_are_found() -> None:
    """The search for blocks finds commands, their output, comments before them, and Python code."""
    page = ROOT / "docs" / "reference" / "errors.md"
    found = next(b for b in blocks(page) if b.mark == "run")
    assert found.language == "console"
    first, *_ = commands(found)
    assert first.words[:3] == ["chrion", "model", "lstm"]
    assert first.expected.startswith("written: tiny.onnx")
    assert [c.exit_code for c in commands(found)] == [0, 3, 2]


@pytest.mark.parametrize(
    ("expected", "printed", "equal"),
    [
        ("a  b", "a b\n", True),
        ("a ... d", "a b\nc d", True),
        ("a ... d", "a b c", False),
        ("took 3 ms", "took 4 ms", False),
        ("...", "", True),
        ("a.b", "axb", False),
    ],
)
def test_output_is_compared(expected: str, printed: str, *, equal: bool) -> None:
    """Output is compared word by word, and an ellipsis stands for any text."""
    assert matches(expected, printed) is equal


@pytest.mark.parametrize(
    "source",
    ["import chrion\nchrion.lode('x')", "from chrion import Plam", "import chrion\nchrion.load(shape=1)", "a b"],
)
def test_wrong_code_is_detected(source: str) -> None:
    """Code with a name or an argument that does not exist is refused."""
    with pytest.raises((AssertionError, AttributeError, TypeError, SyntaxError)):
        check_python(source)


@pytest.mark.parametrize("words", [["plans"], ["partition", "m.onnx", "--budget", "1"], ["partition"]])
def test_wrong_commands_are_detected(words: list[str]) -> None:
    """A command line with an unknown command or option, or without a model, is refused."""
    with pytest.raises(Exception, match=r"(?i)no such|missing|assert"):
        check_chrion(words)


def test_links_lead_to_existing_files_and_headings() -> None:
    """Relative links of a page name files that exist, and headings by the anchors that GitHub gives them."""
    anchors = {page: _anchors(page) for page in PAGES}
    assert "equal-outputs" in anchors[ROOT / "docs" / "reliability.md"]
    for page in PAGES:
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", page.read_text(encoding="utf-8")):
            file = (page.parent / target).resolve() if target else page
            assert file.exists(), (page, target)
            assert not anchor or anchor in anchors[file], (page, target, anchor)


def test_no_two_blocks_write_the_same_model() -> None:
    """A reader who follows several pages in one folder never builds a model whose file exists, which is refused."""
    pages = [block for block in BLOCKS if block.page.name != "cli.md" and block.language in {"sh", "console"}]
    lines = [command.words for block in pages for command in commands(block)]
    written = [words[words.index("-o") + 1] for words in lines if words[:2] == ["chrion", "model"] and "-o" in words]
    assert len(written) >= 5
    assert sorted(written) == sorted(set(written))


def test_names_in_the_text_exist() -> None:
    """Files and modules that a page names in its text exist, and modules have the attributes that the text names."""
    top = r"(?:chrion|docs|examples|models|profiles|scenarios|scripts|tests)/[\w./-]+|(?:test|bench)_\w+\.py"
    files = {path.name for folder in ("tests", "scripts") for path in (ROOT / folder).rglob("*.py")}
    packages = sorted(p.name for p in (ROOT / "chrion").iterdir() if (p / "__init__.py").exists())
    dotted = re.compile(rf"(?:chrion|{'|'.join(packages)})(?:\.[A-Za-z_]\w*)+")
    for page in (page for page in PAGES if page.name != "CHANGELOG.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        quoted = re.findall(r"`([^`\n]+)`", text)
        for name in (q.split()[0] for q in quoted if re.fullmatch(top, q.split()[0]) and not q.endswith("...")):
            assert (ROOT / name).exists() if "/" in name else name in files, (page, name)
        for name in (q for q in quoted if dotted.fullmatch(q) and not q.endswith((".json", ".py", ".policies"))):
            _resolve(name if name.startswith("chrion.") else f"chrion.{name}")


def test_the_results_of_the_readme_are_in_the_pages_it_links_to() -> None:
    """Every figure in the README's list of results is also in the page that its entry links to, or in the results."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"^- \*\*(.*?)\(\[[\w ]+\]\((docs/[^)]*)\)\)\.$", readme, re.MULTILINE | re.DOTALL)
    assert len(found) == 5
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    checked = 0
    for result, page in found:
        text = (ROOT / page).read_text(encoding="utf-8") + results
        for figure in re.findall(r"\d+\.\d+", result):
            assert figure in text, (page, figure)
            checked += 1
    assert checked >= 7


def test_the_readme_names_the_test_command_of_ci() -> None:
    """The command that the README gives for the tests is the one that .ci/run calls."""
    readme, ci = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", ".ci/run"))
    command = "pip install -e '.[test]' && pytest"
    for text in (readme, ci):
        assert re.search(rf"^ *{re.escape(command)} *(#.*)?$", text, re.MULTILINE)


def test_the_reference_documents_what_is_exported() -> None:
    """The API reference names everything that the public modules export, once, and nothing else."""
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\.\. (?:auto)?(?:class|function|data|exception):: ([\w.]+)", text, re.MULTILINE)
    assert len(documented) == len(set(documented))
    modules = re.findall(r"^\.\. module:: (\S+)", text, re.MULTILINE)
    assert modules[0] == "chrion"
    expected = {f"chrion.{name}" for name in chrion.__all__ if name != "__version__"}
    for module in modules[1:]:
        expected |= {f"{module}.{name}" for name in _exported(module) if name not in chrion.__all__}
    # The base of all errors stands among the errors.
    expected = expected - {"chrion.ChrionError"} | {"chrion.errors.ChrionError"}
    assert set(documented) == expected


def test_sections_from_code_and_data_are_current() -> None:
    """Pages have the sections that scripts/fill_pages.py writes: tables of results, commands and layers."""
    for page, text in filled_pages().items():
        assert page.read_text(encoding="utf-8") == text, f"{page.name}: run python scripts/fill_pages.py"


def test_the_command_reference_has_every_option() -> None:
    """The generated reference has a section for each command with all of its options, and no markup of the terminal."""
    text = command_reference(app, "chrion")
    assert "[bold]" not in text
    sections = dict(re.findall(r"^#+ `(.*?)`\n(.*?)(?=^#|\Z)", text, re.MULTILINE | re.DOTALL))
    group = typer.main.get_command(app)
    pending = [(f"chrion {name}", command) for name, command in group.commands.items()]
    assert pending
    while pending:
        name, command = pending.pop()
        options = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert [option for option in options if option not in sections[name]] == [], name
        pending += [(f"{name} {key}", sub) for key, sub in getattr(command, "commands", {}).items()]


def test_documented_arguments_exist() -> None:
    """Every argument that the docstring of a public function or class describes is one of its parameters."""
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    for name in re.findall(r"^\.\. auto(?:class|function):: ([\w.]+)", text, re.MULTILINE):
        public = _resolve(name)
        members = [m for key, m in vars(public).items() if not key.startswith("_")] if inspect.isclass(public) else []
        for described in (public, *filter(inspect.isfunction, members)):
            section = re.search(r"^Args:\n(.*?)(?:^\S|\Z)", inspect.getdoc(described) or "", re.MULTILINE | re.DOTALL)
            found = re.findall(r"^    (\S+)(?=:)|^    (\S+)", section[1], re.MULTILINE) if section else []
            assert {a or b for a, b in found} <= set(inspect.signature(described).parameters), described


def test_the_keys_of_files_are_documented(tmp_path: Path) -> None:
    """The page on file formats has every key of plan and profile files, including nested ones."""
    graph = chrion.load(build("lstm", {"layers": 2, "seq": 2}))
    profile = chrion.Profile.load(ROOT / "profiles" / "gtx1080ti-paper.json")
    profile.save(tmp_path / "profile.json")
    chrion.partition(graph, profile, policy="heft").save(tmp_path / "plan.json")
    plan, stored = (json.loads((tmp_path / f"{name}.json").read_bytes()) for name in ("plan", "profile"))
    page = (ROOT / "docs" / "reference" / "files.md").read_text(encoding="utf-8")
    of_plan, of_profile = page.split("## Profile")
    assert [key for key in {**plan, **plan["predicted"]} if f"`{key}`" not in of_plan] == []
    operator = next(iter(stored["operators"].values()))
    assert [key for key in {**stored, **operator} if f"`{key}`" not in of_profile] == []


def test_the_documentation_is_short() -> None:
    """README and pages have at most 45 000 words; tables do not count."""
    pages = [ROOT / "README.md", *(p for p in PAGES if p.is_relative_to(ROOT / "docs"))]
    lines = [line for page in pages for line in page.read_text(encoding="utf-8").splitlines()]
    assert sum(len(line.split()) for line in lines if not line.startswith("|")) <= 45_000


def test_all_results_are_drawn() -> None:
    """The page of results has a section for every file of results, and every table has as many cells as columns."""
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    folder = ROOT / "docs" / "data"
    assert sorted(re.findall(r"^<!-- begin: (\S+) -->$", page, re.MULTILINE)) == sorted(result_sections(folder))
    for path in folder.glob("*.json"):
        tables = [part for part in read_parts(folder, path.stem) if "rows" in part]
        assert all(len(row) == len(table["columns"]) for table in tables for row in table["rows"]), path.name


def test_honoured_options_are_documented() -> None:
    """The page on options has every option and configuration key that a cut session honours."""
    page = (ROOT / "docs/options.md").read_text()
    honoured = (*INHERITED_OPTIONS, *BASELINE_OPTIONS, *INHERITED_KEYS, *BASELINE_KEYS, *RUN_OPTIONS)
    assert [name for name in honoured if f"`{name}`" not in page] == []


def test_the_table_of_layers_is_complete() -> None:
    """The generated table has a row for every layer."""
    names = [name for layer in LAYERS for name in layer]
    assert sorted(re.findall(r"^\| \d+ \| `(\S+)` \| \S", layer_table(), re.MULTILINE)) == sorted(names)


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("Memcpy node", "faq.md"),
        ("thread pool", "when-it-helps.md"),
        ("SLO", "index.md"),
        ("swapping", "simulation.md"),
        ("CUDA graphs", "faq.md"),
    ],
)
def test_terms_of_the_field_are_found(word: str, page: str) -> None:
    """The page on which a reader would look for a term has it, so that a search finds the page."""
    assert word in (ROOT / "docs" / page).read_text(encoding="utf-8")


def test_no_section_that_a_script_writes_is_empty() -> None:
    """Each pair of markers on a page has content."""
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        sections = re.findall(
            r"<!-- begin: (.+?) -->(.*?)<!-- end: \1 -->", page.read_text(encoding="utf-8"), re.DOTALL
        )
        for name, content in sections:
            assert content.strip(), f"{page.name}: {name}"


def test_the_exceptions_are_documented() -> None:
    """The page on errors draws the same tree of exceptions as the module that defines them."""
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    drawn = set(re.findall(r"\w+Error", page.split("ChrionError\n")[1].split("```")[0]))
    defined = {name for name, value in vars(errors).items() if isinstance(value, type) and name != "ChrionError"}
    assert drawn - {"ValueError", "RuntimeError", "OSError"} == defined


def test_stability_lists_the_public_modules() -> None:
    """The page on stability names the modules of the API reference."""
    reference = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    stability = (ROOT / "docs" / "reference" / "stability.md").read_text(encoding="utf-8")
    modules = re.findall(r"^\.\. module:: (chrion\.\S+)", reference, re.MULTILINE)
    section = stability.split("## Public API")[1].split("\n- ")[1]
    assert set(re.findall(r"`(chrion\.[a-z.]+)`", section)) == set(modules)


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings on GitHub: lower case, without punctuation, with hyphens for spaces."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    }


def _resolve(name: str) -> object:
    """Import a dotted name: a module, or an attribute of one."""
    module, attributes = name, []
    while True:
        try:
            found: object = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, attribute = module.rpartition(".")
            attributes.insert(0, attribute)
    for attribute in attributes:
        found = getattr(found, attribute)
    return found


def _exported(name: str) -> set[str]:
    """Return the public names of a module: ``__all__``, or else those that it defines itself."""
    module = importlib.import_module(name)
    if hasattr(module, "__all__"):
        return set(module.__all__)
    homes = {n: getattr(getattr(v, "__self__", v), "__module__", None) for n, v in vars(module).items()}
    return {n for n, home in homes.items() if home == name and not n.startswith("_")}


def _check_block(block: Block) -> None:
    if block.language in {"console", "sh"}:
        found = commands(block)
        assert found, "no command"
        for command in found:
            _check_command(command.words)
    elif block.language == "python":
        check_python(block.body)
    elif block.language == "toml":
        tomllib.loads(block.body)
    else:
        assert block.language in SHOWN or block.language.startswith("{"), f"unknown language {block.language!r}"


def _check_command(words: list[str]) -> None:
    program, *arguments = [w for w in words if "=" not in w or w.startswith("-")] if "=" in words[0] else words
    if ">" in arguments:
        arguments = arguments[: arguments.index(">")]
    if program == "chrion":
        check_chrion(arguments)
    elif program == "pip":
        _check_extras(arguments)
    elif program == "python" and arguments[0] != "-m":
        script = ROOT / arguments[0]
        assert script.is_file(), script
        known = "".join(p.read_text(encoding="utf-8") for p in (ROOT / "scripts").glob("*.py"))
        for option in (a for a in arguments if a.startswith("--")):
            assert f'"{option.split("=")[0]}"' in known, option
    else:
        assert program in {*TOOLS, "python"}, f"unknown program {program!r}"


def _check_extras(arguments: list[str]) -> None:
    """Check that pip installs only extras that exist."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for named in re.findall(r"(?:chrion|\.)\[([\w,]+)\]", " ".join(arguments)):
        assert set(named.split(",")) <= set(extras)
