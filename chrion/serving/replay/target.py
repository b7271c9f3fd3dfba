"""The server that requests are replayed on: its models, and its metrics."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from prometheus_client.parser import text_string_to_metric_families

from chrion.common.files import parse_json
from chrion.errors import OptionError
from chrion.serving.replay.http_client import HttpAnswer, HttpClient
from chrion.serving.server.rest_codec import HEADER_LENGTH
from chrion.serving.server.tensors import to_raw
from chrion.serving.server.trials import synthetic_input

#: Time within which the server answers requests for metadata and metrics; a server that loads models still answers
#: them.
_ANSWER_S = 30.0
#: Time within which the server is ready, enough to try many large models, and the interval between questions whether
#: it is: at the beginning, and later, so that small servers start at once and large ones are not disturbed.
_READY_S, _FIRST_PAUSE_S, _PAUSE_S = 600.0, 0.2, 1.0
#: Time after which the beginning ends.
_FIRST_S = 2.0
#: Maximum names of missing models in a message, which has one line.
_NAMED = 5


@dataclass(frozen=True, slots=True)
class HttpCall:
    """What is sent for a request of one model."""

    path: str
    body: bytes
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ServerFigures:
    """Figures of the server's metrics at one moment."""

    #: Sums over all models by metric, and values by metric and model.
    totals: Mapping[str, float]
    by_model: Mapping[tuple[str, str], float]
    #: Memory for models by device, in bytes.
    used: Mapping[str, float]
    budget: Mapping[str, float]
    #: Kinds of policies and their names.
    policies: Mapping[str, str]


def served_name(name: str) -> str:
    """Return the name on a server of a scenario's model: copies are ``NAME#2`` in scenarios, ``NAME-2`` on servers."""
    return name.replace("#", "-")


async def calls_of(client: HttpClient, names: Sequence[str]) -> list[HttpCall]:
    """Return the call of each model of a scenario.

    Raises:
        OptionError: The server cannot be reached, is no server of the protocol, or lacks models.
    """
    calls, missing = [], []
    for name in map(served_name, names):
        path = f"/v2/models/{quote(name, safe='')}"
        answer = await ask(client, path)
        if answer.status == 404:
            missing.append(name)
            continue
        calls.append(_call(f"{path}/infer", _document(answer, path)))
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise OptionError(
            f"the server lacks {len(missing)} of the scenario's {len(names)} models: "
            f"{', '.join(missing[:_NAMED])}{more}",
            hint="chrion replay SCENARIO --write-models FOLDER makes models for a scenario",
        )
    return calls


async def wait_until_ready(client: HttpClient) -> None:
    """Wait until the server has tried its models, whose loads would delay the first requests.

    Raises:
        OptionError: The server cannot be reached, or is not ready in time.
    """
    began = time.monotonic()
    while (await ask(client, "/v2/health/ready")).status == 503:
        waited = time.monotonic() - began
        if waited > _READY_S:
            raise OptionError(f"--url: the server is not ready after {_READY_S:g} s", hint="see its log")
        await asyncio.sleep(_FIRST_PAUSE_S if waited < _FIRST_S else _PAUSE_S)


async def read_figures(client: HttpClient) -> ServerFigures:
    """Return the present figures of the server's metrics.

    Raises:
        OptionError: The server has no such metrics.
    """
    answer = await ask(client, "/metrics")
    totals: dict[str, float] = {}
    by_model: dict[tuple[str, str], float] = {}
    devices: dict[str, dict[str, float]] = {"chrion_memory_used_bytes": {}, "chrion_memory_budget_bytes": {}}
    policies: dict[str, str] = {}
    try:
        families = list(text_string_to_metric_families(answer.body.decode())) if answer.status == 200 else []
    except ValueError:
        families = []
    for sample in (sample for family in families for sample in family.samples):
        totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
        if "model" in sample.labels:
            key = sample.name, sample.labels["model"]
            by_model[key] = by_model.get(key, 0.0) + sample.value
        if sample.name in devices:
            devices[sample.name][sample.labels["device"]] = sample.value
        if sample.name == "chrion_server_info":
            policies = {kind: name for kind, name in sample.labels.items() if kind != "version"}
    if "chrion_model_loads_total" not in totals:
        raise OptionError("the server has no metric chrion_model_loads_total at /metrics: replays need chrion serve")
    used, budget = devices.values()
    return ServerFigures(totals, by_model, used, budget, policies)


async def ask(client: HttpClient, path: str) -> HttpAnswer:
    """Return the answer to a GET request.

    Raises:
        OptionError: The server cannot be reached, does not answer, or requires a token, or another one.
    """
    try:
        async with asyncio.timeout(_ANSWER_S):
            answer = await client.request("GET", path)
    except TimeoutError as error:
        raise OptionError(f"--url: {path}: no answer within {_ANSWER_S:g} s") from error
    except OSError as error:
        raise OptionError(f"--url: no answer: {error.strerror or error}", hint="is chrion serve running?") from error
    if answer.status == 401 and client.has_token:
        raise OptionError("--token-file: the server refuses the token")
    if answer.status == 401:
        raise OptionError("--url: the server requires a token", hint="add --token-file")
    return answer


def _call(path: str, metadata: Mapping[str, Any]) -> HttpCall:
    entries, parts = [], []
    for spec in metadata["inputs"]:
        array = synthetic_input(spec["datatype"], spec["shape"])
        parts.append(to_raw(spec["datatype"], array))
        parameters = {"binary_data_size": len(parts[-1])}
        entries.append({**spec, "shape": list(array.shape), "parameters": parameters})
    document = json.dumps({"inputs": entries, "parameters": {"binary_data_output": True}}).encode()
    headers = {HEADER_LENGTH: str(len(document)), "Content-Type": "application/octet-stream"}
    return HttpCall(path, b"".join((document, *parts)), headers)


def _document(answer: HttpAnswer, path: str) -> Mapping[str, Any]:
    try:
        document = parse_json(answer.body)
    except ValueError:
        document = None
    if answer.status != 200 or not isinstance(document, dict) or not isinstance(document.get("inputs"), list):
        reason = (
            f": {document['error']}" if isinstance(document, dict) and isinstance(document.get("error"), str) else ""
        )
        raise OptionError(f"--url: {path}: expected the metadata of a model, found status {answer.status}{reason}")
    return document
