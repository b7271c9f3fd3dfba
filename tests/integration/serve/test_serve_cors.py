"""Requests of pages of other origins (``--cors``), by the rules of the Fetch standard."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from local_server import LocalServer, local_server

ORIGIN = "https://chat.example.org"
OTHER = "https://other.example.org"


def ask(server: LocalServer, path: str, **headers: str) -> tuple[int, Mapping[str, str]]:
    """Send a request without a body; return the status and the headers."""
    status, _, found = server.get(path, **headers)
    return status, found


def preflight(server: LocalServer, origin: str) -> tuple[int, Mapping[str, str]]:
    """Ask as a browser does before a request with JSON and a token."""
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    status, _, found = server.send("OPTIONS", "/v2/models/m/infer", None, headers)
    return status, found


def test_pages_of_the_given_origins_may_send_requests_and_read_answers(tmp_path: Path) -> None:
    """The question needs no token, and its answer names the origin, the method and the headers; errors are readable."""
    with local_server(tmp_path, cors=(ORIGIN, "http://localhost:3000"), token="secret") as server:  # noqa: S106 - a test's
        status, headers = preflight(server, ORIGIN)
        assert (status, headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "POST" in headers["access-control-allow-methods"]
        assert {"authorization", "content-type"} <= {
            *re.split(r",\s*", headers["access-control-allow-headers"].lower())
        }
        status, headers = preflight(server, OTHER)
        assert status == 400
        assert "access-control-allow-origin" not in headers
        for given, expected in (({"Authorization": "Bearer secret"}, 200), ({}, 401)):
            status, headers = ask(server, "/v2", Origin=ORIGIN, **given)
            assert (status, headers["access-control-allow-origin"]) == (expected, ORIGIN)
            assert "x-request-id" in headers["access-control-expose-headers"].lower()
        assert "access-control-allow-origin" not in ask(server, "/v2", Origin=OTHER)[1]


def test_without_the_option_no_page_may_read_answers(tmp_path: Path) -> None:
    """It is off by default; an asterisk is any origin."""
    with local_server(tmp_path) as server:
        assert preflight(server, ORIGIN)[0] == 403
        assert "access-control-allow-origin" not in ask(server, "/v2", Origin=ORIGIN)[1]
    with local_server(tmp_path, cors=("*",)) as server:
        assert preflight(server, ORIGIN)[1]["access-control-allow-origin"] == "*"
