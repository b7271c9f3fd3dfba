"""Requests of pages of other origins (``--cors``), by the rules of the Fetch standard, and by a real browser."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from browser import CHROMIUM, browse
from served_decoders import put_decoder
from server_process import Server, serving

ORIGIN = "https://chat.example.org"
CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": "llama", "messages": [{"role": "user", "content": "w2"}], "max_tokens": 2, "stream": True})


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


@pytest.fixture(scope="module")
def page() -> Iterator[str]:
    with paging() as origin:
        yield origin


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory, page: str) -> Iterator[Server]:
    """Return a server that needs a token, and that two origins may use."""
    root = tmp_path_factory.mktemp("cors")
    put_decoder(root / "models", "llama")
    (root / "token").write_text("secret\n")
    with serving(root / "models", "--cors", ORIGIN, "--cors", page, "--token-file", str(root / "token")) as running:
        yield running


def ask(server: Server, method: str, path: str, **headers: str) -> tuple[int, Mapping[str, str]]:
    """Send a request without a body; return the status and the headers in lower case."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        answer.read()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}
    finally:
        connection.close()


def preflight(server: Server, origin: str) -> tuple[int, Mapping[str, str]]:
    """Ask as a browser does before a request with JSON and a token."""
    return ask(
        server,
        "OPTIONS",
        CHAT,
        Origin=origin,
        Access_Control_Request_Method="POST",
        Access_Control_Request_Headers="authorization,content-type",
    )


def test_pages_of_the_given_origins_may_send_requests(open_server: Server) -> None:
    """The question needs no token, and its answer names the origin, the method and the headers."""
    status, headers = preflight(open_server, ORIGIN)
    assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert "POST" in headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= {*re.split(r",\s*", headers["access-control-allow-headers"].lower())}
    status, headers = preflight(open_server, "https://other.example.org")
    assert status == 400
    assert "access-control-allow-origin" not in headers


def test_answers_and_errors_may_be_read(open_server: Server) -> None:
    """Errors have the header, too, so that a page shows them; other origins get none."""
    for path, given, expected in (("/v1/models", {"Authorization": "Bearer secret"}, 200), ("/v1/models", {}, 401)):
        status, headers = ask(open_server, "GET", path, Origin=ORIGIN, **given)
        assert (status, headers["access-control-allow-origin"]) == (expected, ORIGIN)
        assert "x-request-id" in headers["access-control-expose-headers"].lower()
    _, headers = ask(open_server, "GET", "/v1/models", Origin="https://other.example.org")
    assert "access-control-allow-origin" not in headers


def test_without_the_option_no_page_may_read_answers(tmp_path: Path) -> None:
    """It is off by default; an asterisk is any origin."""
    put_decoder(tmp_path, "llama")
    with serving(tmp_path) as server:
        assert preflight(server, ORIGIN)[0] == 405
        assert "access-control-allow-origin" not in ask(server, "GET", "/v1/models", Origin=ORIGIN)[1]
    with serving(tmp_path, "--cors", "*") as server:
        assert preflight(server, ORIGIN)[1]["access-control-allow-origin"] == "*"


@pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed")
def test_pages_in_a_browser(open_server: Server, page: str, tmp_path: Path) -> None:
    """A browser lets the page of a given origin read a whole stream, and that of another one nothing."""
    assert read_in_browser(open_server, page, tmp_path / "own").endswith("data: [DONE]\n\n")
    with paging() as other:
        assert read_in_browser(open_server, other, tmp_path / "other").startswith("TypeError")


def read_in_browser(server: Server, page: str, folder: Path) -> str:
    """Return the answer to a chat that a page reads, or the error that it gets."""
    folder.mkdir()
    fetch = f"""window.found = ""; fetch("{server.url}{CHAT}", {{
        method: "POST", body: {json.dumps(BODY)},
        headers: {{"Content-Type": "application/json", "Authorization": "Bearer secret"}},
    }}).then((answer) => answer.text()).then((text) => {{ window.found = text; }})
      .catch((error) => {{ window.found = String(error); }});"""
    with browse(page, folder) as opened:
        opened.wait_for(f"location.origin === '{page}' && document.readyState === 'complete'")
        opened.value(fetch)
        return str(opened.wait_for("window.found"))
