"""The server's page, and pages of other origins, in a real browser."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from browser import CHROMIUM, Page, browse
from model_repository import product, put
from served_decoders import put_decoder
from server_process import Server, serving

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed")
X = np.ones((2, 4), np.float32)


def row(model: str) -> str:
    """Return an expression for the cells of a model's row, by the titles of the columns; null without such a row."""
    return f"""(() => {{
        const titles = [...document.querySelectorAll("#idle-box th")].map((cell) => cell.textContent);
        const cells = (row) => [...row.cells].map((cell) => cell.textContent);
        const rows = [...document.querySelectorAll("#models tr, #idle tr")].map(cells);
        const found = rows.find((cells) => cells[0] === "{model}");
        return found ? Object.fromEntries(found.map((text, i) => [titles[i], text])) : null;
    }})()"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of two models, one of which is loaded, with model control."""
    root = tmp_path_factory.mktemp("models")
    put(root, "first", product(seed=1), toml='slo = "0.001ms"\n')
    put(root, "second", product(seed=2))
    with serving(root, "--model-control", "explicit", "--load-model", "*") as running:
        yield running


@pytest.fixture
def page(models: Server, tmp_path: Path) -> Iterator[Page]:
    """Return the server's page in a browser."""
    with browse(models.url, tmp_path) as opened:
        yield opened


def test_the_page_follows_the_requests(models: Server, page: Page) -> None:
    """Requests, violations of the SLO and the place of a model appear without reloading the page."""
    page.wait_for(row("first / 1"))
    before = int(page.value(row("first / 1"))["requests"])
    for _ in range(3):
        assert models.infer("first", X)[0] == 200
    page.wait_for(f'{row("first / 1")}.requests === "{before + 3}"')
    shown = page.value(row("first / 1"))
    assert shown["state"] == "resident, cpu"
    assert shown["SLO ms"] == "0.001"
    assert shown["over SLO"] == "100 %"
    assert 0 < float(shown["p50 ms"]) <= float(shown["p99 ms"])
    assert float(shown["memory"].removesuffix(" MB")) > 0
    assert page.wait_for(f"Number({row('first / 1')}['requests/s']) > 0")


def test_the_page_shows_the_memory_at_the_scale_of_what_is_used(models: Server, page: Page) -> None:
    """Each event adds a point in the upper half of the chart, though the budget is far above."""
    models.infer("first", X)
    line = "document.querySelector('figure[data-title=\"Memory, host\"] .line')"
    points = f"({line}?.getAttribute('points') || '').split(' ').filter(Boolean)"
    count = f"{points}.length"
    first = page.wait_for(count)
    page.wait_for(f"{count} > {first}")
    page.wait_for(f"Number({points}.at(-1).split(',')[1]) < 50")
    assert page.value("document.querySelector('figure[data-title=\"Memory, host\"] .budget').style.display") == "none"


def test_the_page_lists_what_is_not_served_and_folds_what_is_idle(tmp_path: Path) -> None:
    """Models without requests are folded, in natural order, and those that cannot be served are listed with the reason.

    No name or reason is wider than a small screen, in light or dark colours.
    """
    root = tmp_path / "models"
    for name in ("m-10", "m-9", "m-1", "with-a-name-" * 9):
        put(root, name, product())
    (root / "broken-" / "1").mkdir(parents=True)
    (root / "broken-" / "1" / "model.onnx").write_bytes(b"x" * 100)
    (tmp_path / "profile").mkdir()
    with serving(root) as running, browse(running.url, tmp_path / "profile") as page:
        page.wait_for(row("m-9 / 1"))
        names = page.value('[...document.querySelectorAll("#idle tr")].map((row) => row.cells[0].textContent)')
        assert names[:3] == ["m-1 / 1", "m-9 / 1", "m-10 / 1"]
        assert not page.value('document.getElementById("idle-box").open')
        title = page.value('document.getElementById("idle-title").textContent')
        assert title == "Idle models: 4 without a request yet"
        assert page.value(row("m-9 / 1"))["state"] == "on disk"
        problem = page.value('document.getElementById("problems").textContent')
        assert problem.startswith("broken- / 1")
        assert "not an ONNX model" in problem
        page.value('document.getElementById("idle-box").open = true')
        running.infer("m-9", X)
        page.wait_for('document.querySelector("#models tr")?.cells[0].textContent === "m-9 / 1"')
        backgrounds = set()
        for dark in (False, True):
            page.emulate(390, 800, dark=dark)
            assert page.value("document.documentElement.scrollWidth") <= 390
            backgrounds.add(page.value("getComputedStyle(document.body).backgroundColor"))
        assert len(backgrounds) == 2


def test_the_page_asks_for_a_token(tmp_path: Path) -> None:
    """Without the right token the page says that it needs one, and shows the models after it was typed."""
    root = tmp_path / "models"
    put(root, "only", product())
    (tmp_path / "token").write_text("secret\n")
    (tmp_path / "profile").mkdir()
    options = ["--token-file", str(tmp_path / "token")]
    with serving(root, *options) as running, browse(running.url, tmp_path / "profile") as page:
        for typed in ("wrong", "secret"):
            page.wait_for("document.getElementById('login')?.hidden === false")
            page.value(f"document.getElementById('token').value = '{typed}'")
            page.value("document.getElementById('login').requestSubmit()")
        page.wait_for(row("only / 1"))


def test_the_page_shows_unloaded_models(models: Server, page: Page) -> None:
    """A model that is unloaded leaves the table or is shown as on disk, and comes back when it is loaded."""
    loaded = f"{row('second / 1')}?.state"
    models.infer("second", X)
    page.wait_for(f'{loaded} === "resident, cpu"')
    assert models.get("/v2/repository/models/second/unload", {})[0] == 200
    page.wait_for(f'{loaded} !== "resident, cpu"')
    assert models.get("/v2/repository/models/second/load", {})[0] == 200
    models.infer("second", X)
    page.wait_for(f'{loaded} === "resident, cpu"')


def test_the_page_of_a_server_without_models(tmp_path: Path) -> None:
    """It says so, with the layout of a repository."""
    (tmp_path / "models").mkdir()
    (tmp_path / "profile").mkdir()
    with serving(tmp_path / "models") as running, browse(running.url, tmp_path / "profile") as page:
        page.wait_for('document.getElementById("empty")?.hidden === false')
        assert "NAME/VERSION/model.onnx" in page.value('document.getElementById("empty").textContent')


def test_the_page_says_that_the_server_has_gone(tmp_path: Path) -> None:
    """A page that stays open does not show old figures as if they were current."""
    root = tmp_path / "models"
    put(root, "only", product())
    (tmp_path / "profile").mkdir()
    with serving(root) as running, browse(running.url, tmp_path / "profile") as page:
        page.wait_for(row("only / 1"))
        running.process.terminate()
        running.process.wait(30)
        page.wait_for('document.getElementById("state").textContent === "not connected"')


class _Page(BaseHTTPRequestHandler):
    """An empty page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *about: object) -> None:
        """Write nothing."""


@contextlib.contextmanager
def paging() -> Iterator[str]:
    """Run a server with an empty page; yield its origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_pages_of_other_origins(tmp_path: Path) -> None:
    """A browser lets the page of a given origin read a whole stream, and that of another one nothing."""
    put_decoder(tmp_path / "models", "llama")
    (tmp_path / "token").write_text("secret\n")
    with paging() as page, paging() as other:
        options = ["--cors", "https://chat.example.org", "--cors", page, "--token-file", str(tmp_path / "token")]
        with serving(tmp_path / "models", *options) as server:
            assert read_in_browser(server, page, tmp_path / "own").endswith("data: [DONE]\n\n")
            assert read_in_browser(server, other, tmp_path / "other").startswith("TypeError")


def read_in_browser(server: Server, page: str, folder: Path) -> str:
    """Return the answer to a chat that a page reads, or the error that it gets."""
    folder.mkdir()
    chat = {"model": "llama", "messages": [{"role": "user", "content": "w2"}], "max_tokens": 2, "stream": True}
    fetch = f"""window.found = ""; fetch("{server.url}/v1/chat/completions", {{
        method: "POST", body: {json.dumps(json.dumps(chat))},
        headers: {{"Content-Type": "application/json", "Authorization": "Bearer secret"}},
    }}).then((answer) => answer.text()).then((text) => {{ window.found = text; }})
      .catch((error) => {{ window.found = String(error); }});"""
    with browse(page, folder) as opened:
        opened.wait_for(f"location.origin === '{page}' && document.readyState === 'complete'")
        opened.value(fetch)
        return str(opened.wait_for("window.found"))
