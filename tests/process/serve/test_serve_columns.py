"""Classical pipelines over the server: one input a column, texts and numbers, as converters make them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from model_repository import columns, put
from server_process import Server, serving

CLIENT = Path(__file__).parents[2] / "triton_checks.py"


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Return a server of a pipeline that batches requests."""
    root = tmp_path_factory.mktemp("pipelines")
    put(root, "columns", columns(), toml="[batching]\nmax_size = 8\nmax_delay = '20ms'\n")
    with serving(root) as running:
        yield running


def ask(server: Server, cities: list[Any], distances: list[Any]) -> tuple[int, Any]:
    """Send a request in JSON; return the status and the document."""
    inputs = [
        {"name": "city", "datatype": "BYTES", "shape": [len(cities), 1], "data": cities},
        {"name": "distance", "datatype": "FP32", "shape": [len(distances), 1], "data": distances},
    ]
    status, body, _ = server.send("POST", "/v2/models/columns/infer", json.dumps({"inputs": inputs}).encode(), {})
    return status, json.loads(body)


def test_columns_of_texts_and_numbers_are_batched(pipeline: Server) -> None:
    """Each of many requests at the same time gets the labels and probabilities of its own rows."""
    requests = [(["Oslo"], [0.5]), (["Rome", "unseen"], [2.0, 0.5]), ([""], [3.0])] * 4
    wanted = [["late"], ["late", "in time"], ["late"]] * 4
    with ThreadPoolExecutor(len(requests)) as clients:
        answers = list(clients.map(lambda own: ask(pipeline, *own), requests))
    assert [status for status, _ in answers] == [200] * len(requests)
    found = [{output["name"]: output for output in document["outputs"]} for _, document in answers]
    assert [own["label"]["data"] for own in found] == wanted
    assert {own["label"]["datatype"] for own in found} == {"BYTES"}
    assert found[1]["probabilities"]["data"] == [0.25, 0.75, 1.0, 0.0]


def test_a_column_that_does_not_fit_is_refused_in_one_line(pipeline: Server) -> None:
    """A number among texts, a text among numbers, and columns of different lengths are named."""
    for cities, distances, expected, about in (
        ([7], [0.5], 400, "city"),
        (["Oslo"], ["far"], 400, "distance"),
        (["Oslo", "Rome"], [0.5], 400, "inputs differ in dimension 'rows': 2 in city; 1 in distance"),
    ):
        status, document = ask(pipeline, cities, distances)
        assert (status, about in document["error"]) == (expected, True), document
        assert "\n" not in document["error"]


@pytest.mark.skipif(
    importlib.util.find_spec("tritonclient") is None, reason="tritonclient: pip install 'tritonclient[all]'"
)
def test_tritons_client_sends_columns(pipeline: Server) -> None:
    """Triton's client sends texts and numbers by both protocols, and gets labels that are texts."""
    command = [sys.executable, str(CLIENT), str(pipeline.http), str(pipeline.grpc), "columns"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.splitlines()[-1] == "passed"
