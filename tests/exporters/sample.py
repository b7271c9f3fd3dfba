"""The sample of exported models that is kept in the repository, without large weights and inputs.

Two files a case: ``NAME.onnx.gz``, the stripped model, and ``NAME.json``, the case and its requests. Weights and large
inputs are drawn from seeds when the case is restored, so that plain onnxruntime's answers are those for the restored
model.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from cases import Case, Feed, read_case, read_feeds
from seeding import Recipe, restore, seedable, strip

SAMPLE = Path(__file__).parent / "sample"
#: Integer types of which inputs may be drawn again.
_INPUT_INTEGERS = frozenset({"int8", "uint8", "int32", "int64"})


@dataclass(frozen=True)
class Sampled:
    """A restored case."""

    case: Case
    model: Path
    feeds: list[Feed]


def write_sample(folder: Path, into: Path = SAMPLE) -> int:
    """Write the case in a folder into the sample.

    Returns:
        The size in bytes.
    """
    case = read_case(folder)
    into.mkdir(parents=True, exist_ok=True)
    stem = into / case.name.replace("/", "-")
    content = strip(onnx.load(folder / "model.onnx")).SerializeToString(deterministic=True)
    model, description = stem.with_name(f"{stem.name}.onnx.gz"), stem.with_name(f"{stem.name}.json")
    model.write_bytes(gzip.compress(content, mtime=0))
    feeds = [
        {name: _describe(value, f"{name} {at}") for name, value in feed.items()}
        for at, feed in enumerate(read_feeds(folder))
    ]
    description.write_text(json.dumps({"case": asdict(case), "feeds": feeds}, separators=(",", ":")) + "\n")
    return model.stat().st_size + description.stat().st_size


def read_sample(stem: str, folder: Path, sample: Path = SAMPLE) -> Sampled:
    """Restore a case; its model is written into a folder."""
    description = json.loads((sample / f"{stem}.json").read_text())
    stripped = onnx.load_from_string(gzip.decompress((sample / f"{stem}.onnx.gz").read_bytes()))
    model = folder / "model.onnx"
    model.write_bytes(restore(stripped).SerializeToString())
    feeds = [{name: _restored(value) for name, value in feed.items()} for feed in description["feeds"]]
    return Sampled(Case(**description["case"]), model, feeds)


def sample_case(stem: str, sample: Path = SAMPLE) -> Case:
    """Return the description of a case."""
    return Case(**json.loads((sample / f"{stem}.json").read_text())["case"])


def sample_names(sample: Path = SAMPLE) -> list[str]:
    """Return the names of all cases of the sample."""
    return sorted(path.name.removesuffix(".onnx.gz") for path in sample.glob("*.onnx.gz"))


def _describe(value: np.ndarray[Any, Any] | list[np.ndarray[Any, Any]], name: str) -> dict[str, Any]:
    if isinstance(value, list):
        return {"items": [_describe(item, f"{name} {at}") for at, item in enumerate(value)]}
    if seedable(value, _INPUT_INTEGERS):
        return {"seeded": Recipe.of(value, name).to_json()}
    values = value.astype(np.float64) if value.dtype.name in {"float16", "bfloat16"} else value
    return {"dtype": value.dtype.name, "shape": list(value.shape), "values": values.ravel().tolist()}


def _restored(content: Mapping[str, Any]) -> Any:
    if "items" in content:
        return [_restored(item) for item in content["items"]]
    if "seeded" in content:
        return Recipe.from_json(content["seeded"]).draw()
    return np.array(content["values"], content["dtype"]).reshape(content["shape"])
