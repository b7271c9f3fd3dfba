"""Requests that pages of other origins make a browser send, bodies of other media types, and what answers reveal."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from chrion.serving.server.options import ServerOptions
from chrion.serving.server.origins import SenderRules, is_loopback
from local_server import LocalServer, local_server
from model_repository import product, put
from server_client import infer_body

ROWS = np.ones((1, 4), np.float32)
FOREIGN = "https://evil.example"
#: Every path with a method that changes the state or computes, by its path.
POSTS = (
    "/v2/repository/index",
    "/v2/repository/models/product/load",
    "/v2/repository/models/product/unload",
    "/v2/models/product/infer",
    "/v2/models/product/versions/1/infer",
    "/v2/models/product/generate",
    "/v2/models/product/generate_stream",
    "/v1/completions",
    "/v1/chat/completions",
)


def post(server: LocalServer, path: str, body: bytes = b"", **headers: str) -> tuple[int, str, Mapping[str, str]]:
    """Send a POST request; return the status, the message of the error, and the headers."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    status, content, found = server.send("POST", path, body, named)
    error = json.loads(content).get("error", "") if status >= 400 else ""
    return status, error["message"] if isinstance(error, dict) else error, found


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Return a server in explicit mode whose model stays loaded if nothing gets through."""
    root = tmp_path_factory.mktemp("small")
    put(root, "product", product())
    with local_server(root, control="explicit", load=("*",), cors=("https://chat.example.org",)) as server:
        yield server
        assert server.infer("product", ROWS)[0] == 200


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("origin", [FOREIGN, "null", "", "http://localhost:1", "http://localhost.evil.example"])
def test_pages_of_other_origins_are_refused_everywhere(small: LocalServer, path: str, origin: str) -> None:
    """An origin that is neither the server's nor one of --cors gets 403 in one line, whatever the path."""
    status, message, _ = post(small, path, Origin=origin, Content_Type="text/plain")
    assert status == 403
    assert message.startswith("Origin ")
    assert "\n" not in message


@pytest.mark.parametrize("origin", ["http://localhost", "https://LOCALHOST", "https://chat.example.org"])
def test_the_own_page_and_those_of_cors_are_served(small: LocalServer, origin: str) -> None:
    """The server's own origin, also behind a proxy with TLS, and the origins of --cors are served."""
    body = json.dumps(infer_body(ROWS)).encode()
    assert post(small, "/v2/models/product/infer", body, Origin=origin, Content_Type="application/json")[0] == 200


def test_images_of_other_pages_are_refused_and_links_are_not(small: LocalServer) -> None:
    """Requests without an origin are refused if the browser names another site as their cause, except for links."""
    assert small.get("/events", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert small.get("/metrics", Sec_Fetch_Site="same-site", Sec_Fetch_Mode="no-cors")[0] == 403
    assert small.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate")[0] == 200
    assert small.get("/metrics", Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors")[0] == 200
    assert small.get("/metrics", Sec_Fetch_Site="none", Sec_Fetch_Mode="navigate")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("localhost.", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8000", 200),
        ("192.0.2.7", 200),
        ("chat.example.org:8443", 200),  # a proxy that serves the page of --cors
        ("evil.example", 403),
        ("evil.example:8000", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("[::1", 403),
        ("127.1", 403),
        ("\xe9", 403),
    ],
)
def test_a_server_of_this_machine_has_only_its_own_names(small: LocalServer, host: str, status: int) -> None:
    """A page whose name has been resolved to this machine is refused, though it is of the server's own origin."""
    found, _, _ = small.send("GET", "/v2", None, {"Host": host.encode("latin-1")})  # type: ignore[dict-item]
    assert found == status
    found, _, _ = post(small, "/v2/repository/index", Host=host.encode("latin-1"))  # type: ignore[arg-type]
    assert found == status


def test_a_server_of_a_public_address_has_any_name(tmp_path: Path) -> None:
    """Names of services and of proxies are unknown to the server, so that only the origin is checked."""
    for address in ("0.0.0.0", "::", "192.0.2.1"):  # noqa: S104 - nothing is bound
        rules = SenderRules.of(ServerOptions(tmp_path, http=(address, 8000)))
        rules.check("POST", {b"host": b"chrion.default.svc:8000", b"origin": b"http://chrion.default.svc:8000"})
    assert [is_loopback(host) for host in ("127.0.0.1", "127.8.9.1", "::1", "localhost")] == [True] * 4
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "192.0.2.1", "unknown.invalid"))  # noqa: S104


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "kind", ["text/plain", "text/plain;application/json", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_media_types_that_pages_may_send_are_refused(small: LocalServer, path: str, kind: str) -> None:
    """A body that a browser sends without a preflight request gets 415 in one line, which names the expected type."""
    status, message, _ = post(small, path, b"{}", Content_Type=kind)
    assert status == 415
    assert "expected application/json" in message


@pytest.mark.parametrize(
    "headers", [{}, {"Content-Type": "application/json"}, {"Content-Type": "Application/JSON; charset=utf-8"}]
)
def test_media_types_of_clients_are_served(small: LocalServer, headers: Mapping[str, str]) -> None:
    """JSON is served with and without its media type, and binary tensors with theirs."""
    body = json.dumps(infer_body(ROWS)).encode()
    assert small.send("POST", "/v2/models/product/infer", body, headers)[0] == 200
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 4], "parameters": {"binary_data_size": 16}}
    header = json.dumps({"inputs": [entry]}).encode()
    binary = {"Content-Type": "application/octet-stream", "Inference-Header-Content-Length": str(len(header))}
    assert small.send("POST", "/v2/models/product/infer", header + ROWS.tobytes(), binary)[0] == 200


def test_no_page_shows_an_answer_in_a_frame(small: LocalServer) -> None:
    """Every answer forbids frames and other media types than its own, failures included."""
    for path, status in (("/", 200), ("/v2", 200), ("/metrics", 200), ("/missing", 404), ("/v2/models/missing", 404)):
        found, _, headers = small.get(path)
        assert found == status
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_answers_have_no_paths_of_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Reasons name files without their folders, wherever they are answered; the log keeps the paths."""
    root = tmp_path / "all models"
    root.mkdir()
    put(root, "garbage", b"not a model")
    put(root, "settings", product(), toml="unknown = 1\n")
    (root / "missing" / "1").mkdir(parents=True)
    put(root, "broken", product(), toml="[variants.a]\nplan = 'no.plan.json'\n")
    changed = put(root, "changed", product())
    with caplog.at_level(logging.INFO), local_server(root, control="explicit", load=("*",)) as server:
        changed.write_bytes(product(seed=3).SerializeToString() + b"\0")
        texts = [server.infer("changed", ROWS)[1]["error"]]
        for name in ("garbage", "settings", "missing", "broken", "absent"):
            status, message, _ = post(server, f"/v2/repository/models/{name}/load")
            assert status in (400, 404)
            texts.append(message)
        texts += [entry["reason"] for entry in server.get("/v2/repository/index", b"")[1]]
        texts.append(str(server.get("/v2/models/changed/ready")[1]))
        with server.in_flight("/events") as events:
            texts.append(next(iter(_content(events))).decode())
    assert "model.onnx" in " ".join(texts)
    assert not [text for text in texts if str(tmp_path.parent) in text or "all models" in text]
    reasons = [str(getattr(record, "fields", {}).get("reason")) for record in caplog.records]
    assert any(str(root) in reason for reason in reasons)


def _content(exchange: object) -> Iterator[bytes]:
    exchange.response()  # type: ignore[attr-defined]
    return iter(exchange)  # type: ignore[call-overload, no-any-return]
