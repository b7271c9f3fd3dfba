"""Tests of a sample of exported models in every way; ``scripts/exporters.py`` checks the whole corpus."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import memory_check
import numpy as np
import onnx
import onnxruntime as ort
import pytest
import timing
from cases import Feed, write_feeds
from checks import QUICK, check
from families import read_requirements
from memory_check import Comparison, Footprint, above_aim, summarise
from result_files import read_parts, read_rows
from sample import SAMPLE, read_sample, sample_case, sample_names

import exporters
from chrion import HybridSession
from helpers import FLOAT, branches, make_model, node, value
from output_comparison import Tolerance

pytestmark = pytest.mark.usefixtures("short_planning")
NAMES = sample_names()
#: Exporters of which the sample must contain models.
EXPORTERS = (
    "torch.onnx (TorchScript)",
    "torch.onnx (dynamo)",
    "tf2onnx",
    "jax2onnx",
    "paddle2onnx",
    "skl2onnx",
    "LightGBM",
    "XGBoost",
    "CatBoost",
    "quantize_static",
    "quantize_dynamic",
    "onnxruntime.transformers optimizer",
    "onnxruntime offline optimization",
    "float16",
)
#: Families of which every model can be cut.
CUTTABLE = ("transformer", "vision", "ort_tools", "genai_models")
#: Transformers that the sample must contain, since onnxruntime fuses a part of an attention unlike the whole.
TRANSFORMERS = ("bert", "gpt2-past", "llama-past", "t5-", "vit", "whisper-", "swin")
DEFAULT_TOLERANCE = Tolerance()


@pytest.fixture(autouse=True, scope="module")
def _no_warnings_of_onnxruntime() -> Iterator[None]:
    """Silence the logger, since some exporters write unused weights, about which onnxruntime warns."""
    ort.set_default_logger_severity(4)
    yield
    ort.set_default_logger_severity(2)


@pytest.mark.parametrize("name", NAMES)
def test_an_exported_model_gives_plain_onnxruntimes_outputs(name: str, tmp_path: Path) -> None:
    """Outputs are equal by default, with every policy and random cuts, for arrays, OrtValues and bindings."""
    restored = read_sample(name, tmp_path)
    tolerance = Tolerance(restored.case.rtol, restored.case.atol)
    outcome = check(restored.model, restored.feeds, tolerance, QUICK, name)
    assert outcome.findings == []
    assert outcome.runs > outcome.failed, "plain onnxruntime serves no request"
    assert outcome.unsettled < outcome.runs / 4
    assert outcome.cut or not restored.case.name.startswith(CUTTABLE), "no plan cuts it"


def test_the_sample_is_small_and_covers_all_exporters() -> None:
    """The sample has at least 36 models, some of every exporter, in less than 1.2 MB."""
    found = {sample_case(name).exporter for name in NAMES}
    assert len(NAMES) >= 36
    assert [name for name in EXPORTERS if not any(name in exporter for exporter in found)] == []
    kinds = [name.partition("-")[2] for name in NAMES if name.startswith("transformer_")]
    assert [kind for kind in TRANSFORMERS if not any(name.startswith(kind) for name in kinds)] == []
    assert sum(path.stat().st_size for path in SAMPLE.iterdir()) < 1.2e6


X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


@pytest.fixture
def two_branches(tmp_path: Path) -> Path:
    """Return the file of a model of two branches."""
    onnx.save(branches(), tmp_path / "model.onnx")
    return tmp_path / "model.onnx"


def find(model: Path, *feeds: Feed, kind: type[HybridSession] = HybridSession) -> list[str]:
    """Return the findings of a quick check."""
    return check(model, feeds, DEFAULT_TOLERANCE, QUICK, kind=kind).findings


class Wrong(HybridSession):
    """A session whose outputs differ in one number."""

    def run(self, *given: Any) -> list[Any]:
        outputs: list[Any] = super().run(*given)
        outputs[0][0, 0] += 0.01
        return outputs


class Shared(HybridSession):
    """A session that writes all outputs to the same buffers."""

    buffers: list[Any] | None = None

    def run(self, *given: Any) -> list[Any]:
        outputs = super().run(*given)
        self.buffers = self.buffers or [output.copy() for output in outputs]
        for buffer, output in zip(self.buffers, outputs, strict=True):
            buffer[...] = output
        return self.buffers


class Failing(HybridSession):
    """A session that serves no request of arrays."""

    def run(self, *_: Any) -> list[Any]:
        raise RuntimeError("injected")


def test_a_wrong_output_is_a_finding(two_branches: Path) -> None:
    """An output that differs in one number is a finding in every stage that it affects."""
    assert find(two_branches, {"x": X}, {"x": X + 1}) == []
    findings = find(two_branches, {"x": X}, {"x": X + 1}, kind=Wrong)
    assert any(finding.startswith("default, run, request 0: output 0") for finding in findings)
    assert any(finding.startswith("policy heft") for finding in findings)
    assert not any("IOBinding" in finding for finding in findings)


def test_an_overwritten_output_is_a_finding(two_branches: Path) -> None:
    """Outputs are compared after all requests have been served, so that overwritten ones are found."""
    findings = find(two_branches, {"x": X}, {"x": X + 1}, kind=Shared)
    assert any(finding.startswith("default, run, request 0") for finding in findings)


def test_an_exception_that_plain_onnxruntime_does_not_raise_is_a_finding(two_branches: Path) -> None:
    """An exception that plain onnxruntime raises for the same call is not a finding."""
    assert find(two_branches, {"x": X[:, :2]}) == []
    assert "default, run: RuntimeError: injected" in find(two_branches, {"x": X}, kind=Failing)


def test_a_model_that_plain_onnxruntime_refuses_is_refused(tmp_path: Path) -> None:
    """HybridSession must raise the same exception."""
    onnx.save(
        make_model([node("NoSuch", ["x"], ["y"])], [value("x", FLOAT, [1])], [value("y", FLOAT, [1])]), tmp_path / "m"
    )
    outcome = check(tmp_path / "m", [{"x": np.zeros(1, np.float32)}], DEFAULT_TOLERANCE, QUICK)
    assert (outcome.findings, outcome.failed) == ([], 1)


def _write(folder: Path, model: onnx.ModelProto, *feeds: Feed) -> None:
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")
    write_feeds(folder, feeds)
    name = f"{folder.parent.name}/{folder.name}"
    (folder / "case.json").write_text(f'{{"name": "{name}", "exporter": "onnx.helper", "version": "1"}}')


def crash_on_bad(job: exporters.Job) -> exporters.Row:
    """Check a case; end the process if its folder is named *bad*."""
    if job.folder.name == "bad":
        os.kill(os.getpid(), signal.SIGKILL)
    return exporters.check_case(job)


def test_the_script_writes_the_results_and_reports_crashes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each case has a row, a crash affects one case only, and the exit code is 1."""
    _write(tmp_path / "corpus" / "family" / "good", branches(), {"x": X})
    _write(tmp_path / "corpus" / "family" / "bad", branches(), {"x": X})
    arguments = ["check", str(tmp_path / "corpus"), "--quick", "-o", str(tmp_path)]
    assert exporters.main([*arguments, "--only", "good", "--latency"]) == 0
    assert read_rows(tmp_path, "exporters")[0][:4] == ["family/good", "onnx.helper 1", "4", "yes"]
    monkeypatch.setattr(exporters, "check_case", crash_on_bad)
    assert exporters.main(arguments) == 1
    assert ["family/bad", "onnx.helper 1", "", "crashed"] in [row[:4] for row in read_rows(tmp_path, "exporters")]
    assert "1 exporters, 1 equal to plain onnxruntime" in read_parts(tmp_path, "exporters")[0]["text"]
    assert "1 with differences" in capsys.readouterr().out


def test_reasons_are_shortened_without_paths() -> None:
    """A reason in the table of a page has at most ten words and no path of the machine on which it was measured."""
    reason = "model m runs plain: /home/user/corpus/boosting/model.onnx: value 'p' is a seq(map(int64,tensor(float)))"
    assert exporters.shorten_reason(reason) == "value 'p' is a seq(map(int64,tensor(float)))"
    assert exporters.shorten_reason("model m runs plain: " + "word " * 11) == "word " * 10 + "..."


def test_requirements_are_read_without_importing_a_family(tmp_path: Path) -> None:
    """The requirements of a family with missing packages can be read, and other modules have none."""
    (tmp_path / "family.py").write_text('import no_such_module\nREQUIREMENTS = ["numpy", "--index-url https://x"]\n')
    (tmp_path / "helper.py").write_text("X = 1\n")
    assert read_requirements(tmp_path / "family.py") == ["numpy", "--index-url https://x"]
    assert read_requirements(tmp_path / "helper.py") is None


def test_memory_is_compared_in_separate_processes(tmp_path: Path) -> None:
    """Both processes use more memory after serving than after their imports."""
    _write(tmp_path / "family" / "model", branches(), {"x": X})
    found = memory_check.compare_memory(tmp_path / "family" / "model")
    for process in (found.plain, found.hybrid):
        assert 0 < process.imports_mb < process.steady_mb <= process.peak_mb + 1
        assert process.served == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux reports the memory of a process")
def test_the_memory_of_plans_is_compared_whatever_their_latency(tmp_path: Path) -> None:
    """With ``plans``, a session uses the plan with the best prediction, and keeps within the aim."""
    _write(tmp_path / "family" / "model", parallel_stacks(), {"x": np.ones((512, 256), np.float32)})
    found = memory_check.compare_memory(tmp_path / "family" / "model", plans=True)
    assert found.hybrid.segments > 1
    assert found.beyond_ratio <= memory_check.AIM


def parallel_stacks() -> onnx.ModelProto:
    """Build two independent stacks of matrix products on an input with a free dimension."""
    weights = {f"w{at}": np.eye(256, dtype=np.float32) for at in range(2)}
    nodes, ends = [], []
    for stack in range(2):
        name = "x"
        for at in range(6):
            result = f"{'ab'[stack]}{at}"
            nodes.append(node("MatMul", [name, f"w{stack}"], [result]))
            name = result
        ends.append(value(name, FLOAT, ["rows", 256]))
    return make_model(nodes, [value("x", FLOAT, ["rows", 256])], ends, weights)


def test_models_above_the_memory_aim_are_listed() -> None:
    """The imports are subtracted: 20 MB beyond 100 MB of imports is twice 10 MB beyond 50 MB."""
    plain = Footprint(imports_mb=50, peak_mb=60, steady_mb=60, steady_pss_mb=40, served=3, segments=0)
    heavy = Footprint(imports_mb=100, peak_mb=125, steady_mb=120, steady_pss_mb=90, served=3, segments=0)
    light = Footprint(imports_mb=50, peak_mb=60, steady_mb=60, steady_pss_mb=40, served=3, segments=0)
    comparisons = [Comparison("light", plain, light), Comparison("heavy", plain, heavy)]
    assert [comparison.name for comparison in above_aim(comparisons)] == ["heavy"]
    summary = summarise(comparisons)
    assert "steady memory beyond the imports: 1 of 2 models above 1.3: heavy 2.00\n" in summary
    assert "peak memory beyond the imports: 1 of 2 models above 1.3: heavy 2.50\n" in summary


def test_ratios_are_measured_in_separate_processes(tmp_path: Path) -> None:
    """Every ratio of a model with two shapes is positive."""
    model = branches()
    for info in (model.graph.input[0], *model.graph.output):
        info.type.tensor_type.shape.dim[0].dim_param = "rows"
    _write(tmp_path / "family" / "model", model, {"x": X}, {"x": X[:1]})
    timed = timing.measure(tmp_path / "family" / "model", repeats=1)
    assert [figure for figure in (timed.cold, timed.warm, timed.shapes, timed.latency) if not figure] == []
