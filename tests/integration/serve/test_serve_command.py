"""``chrion serve`` in this process: a whole run, and what it refuses."""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from chrion.serving.server.options import ServerOptions
from command_line import Chrion, assert_refused
from local_server import local_server
from model_repository import product, put
from server_client import wait_until

_SCENARIO = """
patterns = ["gpu"]
[[models]]
name = "m"
[models.variants.gpu]
memory_mb = 24.0
latency_ms = 2.0
"""


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    """Undo the set-up of the command's logs."""
    loggers = [logging.getLogger(name) for name in ("chrion", "chrion.server", "uvicorn", "grpc")]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_a_signal_ends_the_command(cli: Chrion, tmp_path: Path) -> None:
    """It serves the repository, says where, and SIGTERM ends it with exit code 0; reasons do not show folders."""
    put(tmp_path / "models", "m", product())
    put(tmp_path / "models", "damaged", b"not a model")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    states: list[int] = []
    reasons: list[str] = []

    def answers() -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/m/ready", timeout=10) as answer:
                states.append(answer.status)
        except OSError:
            return False
        return True

    def stop() -> None:
        wait_until(answers)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/damaged", timeout=10)
        with refused.value as answer:
            reasons.append(json.load(answer)["error"])
        os.kill(os.getpid(), signal.SIGTERM)

    client = threading.Thread(target=stop)
    client.start()
    code, out, err = cli("serve", "models", "--http", f"127.0.0.1:{port}", "--grpc", "127.0.0.1:0")
    client.join()
    assert (code, out, states) == (0, "", [200])
    assert reasons[0].startswith("model 'damaged': version 1 cannot be served: model.onnx: not an ONNX model")
    assert (
        f"chrion: serving 1 model (not served, see the log: damaged version 1) at http://127.0.0.1:{port} and grpc:"
        in err
    )
    assert [line for line in err.splitlines() if '"event": "stopped"' in line]


def test_wrong_options_are_one_line(cli: Chrion, tmp_path: Path) -> None:
    """A wrong option ends the command with exit code 2 and one line."""
    put(tmp_path / "models", "m", product())
    (tmp_path / "key.pem").write_text("no key")
    free = ["--http", "127.0.0.1:0", "--grpc", "none"]
    tls = ["--tls-certificate", "key.pem", "--tls-key", "key.pem", *free]
    explicit = [*free, "--model-control", "explicit", "--load-model", "m", "--load-model"]
    with socket.create_server(("127.0.0.1", 0)) as used:
        for arguments, about in (
            (["missing"], "repository: expected a folder, found "),
            ([".", "--http", "nowhere"], "expected HOST:PORT"),
            ([".", "--serving-policy", "fastest"], "unknown policy"),
            ([".", "--serving-policy", "lru,lfu"], "two policies"),
            ([".", "--model-control", "auto"], "expected one of none, poll, explicit"),
            ([".", "--load-model", "a"], "only with --model-control explicit"),
            ([".", "--poll", "5s"], "--poll: only with --model-control poll"),
            ([".", "--max-request", "0"], "--max-request: expected a size above zero, found '0'"),
            ([".", "--host-budget", "lots"], "--host-budget: expected a size above zero, found 'lots'"),
            (["models", *explicit, "n"], "--load-model n: no such model in the repository (models found: m)"),
            ([".", "--token-file", "nope"], "--token-file nope: no such file"),
            ([".", "--token-file", "."], "--token-file .: Is a directory"),
            ([".", "--tls-key", "k"], "expected both or none"),
            ([".", "--scenario", "missing"], "not found"),
            ([".", "--replicas", "2"], "--replicas: only with --ray"),
            (["models", "--http", f"127.0.0.1:{used.getsockname()[1]}"], "in use"),
            (["models", "--http", "127.0.0.1:0", "--restart"], "--restart: expected ports other than 0"),
            (["models", *tls], "--tls-certificate"),
        ):
            assert_refused(cli("serve", *arguments), about)


def test_a_scenario_gives_the_policies_and_limits_of_a_server(
    cli: Chrion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server loads models in advance if its scenario does, and has its limit of waiting requests."""
    found: list[ServerOptions] = []
    monkeypatch.setattr("chrion.serving.server.run.run", lambda options, _: found.append(options))
    for name, line in (("unset", ""), ("on", "prefetch = true"), ("off", "prefetch = false\nmax_waiting = 7")):
        (tmp_path / f"{name}.toml").write_text(f"{_SCENARIO}[policies]\n{line}\n", encoding="utf-8")
        assert cli("serve", ".", "--scenario", f"{name}.toml", "--accelerator", "none")[0] == 0
    assert cli("serve", ".", "--scenario", "off.toml", "--accelerator", "none", "--max-waiting", "9")[0] == 0
    assert [options.policies.prefetch for options in found] == [True, True, False, False]
    assert [options.policies.max_waiting for options in found] == [1024, 1024, 7, 9]


def test_a_repository_without_models_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A folder of other files is warned about with the expected layout, unless models may come later."""
    (tmp_path / "lstm.toml").write_text("")
    for control in ("none", "poll", "explicit"):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "chrion.server"), local_server(tmp_path, control=control) as server:
            assert server.begun.startswith("0 models (the repository has none: expected NAME/VERSION/model.onnx")
        assert ("expected NAME/VERSION/model.onnx" in caplog.text) == (control == "none")


def test_a_server_that_others_reach_warns_without_a_token(cli: Chrion, tmp_path: Path) -> None:
    """The log names the addresses that other machines reach, unless a token is required or there are none."""
    put(tmp_path / "models", "m", product())
    (tmp_path / "token").write_text("secret")
    public = ["--http", "192.0.2.1:8000", "--grpc", "192.0.2.2:8001"]  # of documentation: they cannot be bound
    for arguments, expected in (
        (public, '"addresses": ["192.0.2.1:8000", "192.0.2.2:8001"]'),
        ([*public, "--token-file", "token"], ""),
        ([*public[:2], "--grpc", "none"], '"addresses": ["192.0.2.1:8000"]'),
    ):
        code, _, err = cli("serve", "models", *arguments)
        assert code == 2
        assert expected in err
        assert ("every client that reaches the server is served" in err) == bool(expected)


def test_missing_extras_are_named(cli: Chrion, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command says in one line which libraries are missing, and how to install all of them at once."""
    otlp = ["--otlp", "http://127.0.0.1:1"]
    for modules, arguments, about in (
        (["uvicorn", "grpc"], [], "serve: uvicorn, grpc are not installed (pip install 'chrion[serve]', or in"),
        (["ray"], ["--ray", "auto"], "serve: ray is not installed (pip install 'chrion[ray]', or in a checkout"),
        (["uvicorn", "ray"], ["--ray", "auto"], "or in a checkout: pip install -e '.[serve,ray]')"),
        (["opentelemetry", "opentelemetry.sdk"], otlp, "opentelemetry.exporter.otlp.proto.http are not installed"),
    ):
        with monkeypatch.context() as patch:
            for module in modules:
                patch.setitem(sys.modules, module, None)
            assert_refused(cli("serve", ".", *arguments), about)
