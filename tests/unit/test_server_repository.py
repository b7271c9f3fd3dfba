"""The model repository: settings, variants, bad models, changes; and the options of the server."""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from pathlib import Path

import onnx
import pytest

from chrion import load
from chrion.cli.serve import scenario_policies
from chrion.errors import ModelError, OptionError
from chrion.scheduler import fixed_plan
from chrion.serving.manager import PolicySpec
from chrion.serving.manager.records import ACCELERATOR, HOST
from chrion.serving.server.options import parse_address, parse_origin, parse_policies
from chrion.serving.server.repository import BadVersion, ServedVersion, scan
from chrion.serving.server.settings import read_settings
from helpers import alternating_lanes, branches, free_branches
from model_repository import identity, product, put


def served(root: Path, name: str, version: str = "1", *, accelerator: bool = False) -> ServedVersion:
    """Return a version that is served."""
    found = scan(root, accelerator=accelerator)[name, version]
    assert isinstance(found, ServedVersion), found
    return found


def reason(root: Path, name: str, version: str = "1") -> str:
    """Return the reason why a version is not served."""
    found = scan(root, accelerator=False)[name, version]
    assert isinstance(found, BadVersion), found
    return found.reason


def test_the_interface_is_the_models(tmp_path: Path) -> None:
    """Free dimensions are -1, and weights are no inputs."""
    put(tmp_path, "m", free_branches())
    found = served(tmp_path, "m")
    assert [(spec.name, spec.datatype, spec.shape) for spec in found.inputs] == [("x", "FP32", (-1, 4))]
    assert [spec.name for spec in found.outputs] == ["y", "l"]


def test_all_keys_of_the_settings(tmp_path: Path) -> None:
    """Each key has its effect on what the manager is told."""
    toml = "slo = '60ms'\ntimeout = '2s'\npriority = 2\nweight = 3.0\npinned = true\ncores = 2\nmax_queue = 7\n"
    put(tmp_path, "m", free_branches(), toml=toml + "[batching]\nmax_size = 4\nmax_delay = '3ms'\n")
    found = served(tmp_path, "m")
    model = found.managed
    assert (model.slo_ms, model.priority, model.weight, model.pinned) == (60.0, 2, 3.0, True)
    assert (model.max_queue, model.max_batch, model.max_delay_ms) == (7, 4, 3.0)
    assert model.variants[0].cores == 2
    assert found.settings.timeout_ms == 2000.0
    put(tmp_path, "plain", free_branches())
    assert served(tmp_path, "plain").managed.slo_ms == inf


def test_plain_numbers_of_the_settings_are_in_ms_and_mb(tmp_path: Path) -> None:
    """As in options of the command line."""
    toml = "slo = 60\ntimeout = 0.5\nmax_run = '7'\n[batching]\nmax_delay = 0\n[generation]\nkv_memory = 64\n"
    (tmp_path / "model.toml").write_text(toml, encoding="utf-8")
    found = read_settings(tmp_path / "model.toml")
    assert (found.slo_ms, found.timeout_ms, found.max_run_ms) == (60.0, 0.5, 7.0)
    assert found.batching
    assert found.generation
    assert (found.batching.max_delay_ms, found.generation.kv_memory) == (0.0, 64)


@pytest.mark.parametrize(
    ("toml", "about"),
    [
        ("slow = 1", "unknown key 'slow'"),
        ("slo = 'fast'", "slo"),
        ("slo = 0", "slo: expected a duration above zero"),
        ("timeout = true", "timeout: expected a number or text"),
        ("blocks = 0", "blocks: expected a duration above zero"),
        ("alpha = -1", "at least 0"),
        ("cores = 0", "at least 1"),
        ("versions = 'some'", "expected one of all, latest"),
        ("versions = 3", "versions: expected all, latest or a list"),
        ("versions = [0]", "versions[0]: expected a whole number of at least 1"),
        ("batching = 3", "expected a table"),
        ("[batching]\nmax_delay = 'x'", "batching.max_delay"),
        ("variants = 3", "expected a table, found 3"),
        ("[variants.a]\ndevice = 'tpu'", "variants.a.device: expected one of cpu, accelerator"),
        ("not toml", "model.toml"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, toml: str, about: str) -> None:
    """A wrong key or value makes the model bad, with the reason."""
    put(tmp_path, "m", free_branches(), toml=toml)
    with pytest.raises(ModelError, match=r"model\.toml"):
        read_settings(tmp_path / "m" / "model.toml")
    assert about in reason(tmp_path, "m", "")


def test_all_faults_of_the_settings_are_named(tmp_path: Path) -> None:
    """Several wrong keys and values, also those in tables, are in one message, so that one correction is enough."""
    toml = 'slo = "soon"\ncore = 1\npinned = true\n[batching]\nmax_size = 1\n[variants.a]\ncores = -1\n'
    put(tmp_path, "m", free_branches(), toml=toml)
    with pytest.raises(ModelError) as raised:
        read_settings(tmp_path / "m" / "model.toml")
    for fault in ("slo", "unknown key 'core'", "batching.max_size: expected", "variants.a.cores: expected"):
        assert fault in str(raised.value)
    assert "pinned" not in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("toml", "about"),
    [
        ("[variants.a]\nmodel = '../1/model.onnx'", "in the folder of the version"),
        ("[variants.a]\nmodel = '/etc/passwd'", "in the folder of the version"),
        ("[variants.a]\nmodel = 'none.onnx'", "not found"),
        ("[variants.a]\nmodel = 'other.onnx'", "differ"),
        ("[variants.a]\ndevice = 'accelerator'", "there is none"),
        ("[variants.a]\nhost_mb = 1\n[variants.b]\nhost_mb = 2", "at most the host memory"),
    ],
)
def test_wrong_variants_are_named(tmp_path: Path, toml: str, about: str) -> None:
    """A variant that cannot serve makes the version bad, with the reason."""
    file = put(tmp_path, "m", free_branches(), toml=toml)
    (file.parent / "other.onnx").write_bytes(identity("INT8").SerializeToString())
    assert about in reason(tmp_path, "m")


def test_variants_of_a_machine_with_an_accelerator(tmp_path: Path) -> None:
    """By default: the accelerator alone, the plans of the folder, the CPU, which needs no accelerator memory."""
    file = put(tmp_path, "m", branches())
    graph = load(str(file))
    fixed_plan(graph, alternating_lanes(graph)).save(file.parent / "lanes.plan.json")
    found = served(tmp_path, "m", accelerator=True)
    assert [source.name for source in found.sources] == ["gpu", "lanes", "cpu"]
    assert [source.accelerated for source in found.sources] == [True, False, False]
    assert [variant.slots for variant in found.managed.variants] == [1, 0, 0]
    assert found.managed.variants[0].bytes[ACCELERATOR] > 0
    assert found.managed.variants[-1].bytes[ACCELERATOR] == 0
    assert found.managed.variants[1].cores == 2
    assert [source.name for source in served(tmp_path, "m").sources] == ["lanes", "cpu"]
    assert served(tmp_path, "m").managed.variants[0].bytes[HOST] >= file.stat().st_size


def test_plans_in_bfloat16_are_served_if_that_is_allowed(tmp_path: Path) -> None:
    """Otherwise the reason names the key; the packed weights of native kernels count as host memory."""
    file = put(tmp_path, "m", branches())
    graph = load(str(file))
    plan = replace(fixed_plan(graph, alternating_lanes(graph)), native=graph.dag.names, packed_mb=2.0)
    hosts = []
    for precision, packed_mb in (("float32", 0.0), ("float32", 2.0), ("bf16", 2.0)):
        replace(plan, precision=precision, packed_mb=packed_mb).save(file.parent / "lanes.plan.json")
        if precision == "bf16":
            assert 'model.toml allows that by precision = "bf16"' in reason(tmp_path, "m")
            put(tmp_path, "m", branches(), toml='precision = "bf16"\n')
        hosts.append(served(tmp_path, "m").managed.variants[0].bytes[HOST])
    assert hosts == [hosts[0], hosts[0] + 2_000_000, hosts[0] + 2_000_000]


def test_alpha_leaves_out_expensive_variants(tmp_path: Path) -> None:
    """Variants before the one with the least L + alpha * M are not used; with alpha 0 all are."""
    variants = (
        "[variants.gpu]\ndevice = 'accelerator'\nmemory_mb = 100\nlatency_ms = 10\n[variants.cpu]\nlatency_ms = 30\n"
    )
    for alpha, names in ((0.0, ["gpu", "cpu"]), (0.1, ["gpu", "cpu"]), (0.3, ["cpu"])):
        put(tmp_path, "m", branches(), toml=f"alpha = {alpha}\n{variants}")
        assert [source.name for source in served(tmp_path, "m", accelerator=True).sources] == names


def test_plans_are_ordered_by_memory(tmp_path: Path) -> None:
    """Without variants in the settings, a plan that holds more comes first, whatever the names of the files."""
    file = put(tmp_path, "m", branches())
    graph = load(str(file))
    plan = replace(fixed_plan(graph, alternating_lanes(graph)), native=graph.dag.names)
    for name, packed_mb in (("alpha", 1.0), ("beta", 3.0), ("gamma", 2.0)):
        replace(plan, packed_mb=packed_mb).save(file.parent / f"{name}.plan.json")
    assert [source.name for source in served(tmp_path, "m").sources] == ["beta", "gamma", "alpha", "cpu"]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_plans_do_not_take_the_name_of_another_variant(tmp_path: Path, name: str) -> None:
    """A plan that would replace, or be replaced by, the variant without a plan is refused with its file's name."""
    file = put(tmp_path, "m", branches())
    graph = load(str(file))
    fixed_plan(graph, alternating_lanes(graph)).save(file.parent / f"{name}.plan.json")
    assert reason(tmp_path, "m") == f"{name}.plan.json: the variant '{name}' has no plan; rename the file"


def test_versions_of_the_settings_that_are_missing_are_named(tmp_path: Path) -> None:
    """A version that only the settings name is not served, with the reason; the others are."""
    put(tmp_path, "m", branches(), 2, toml="versions = [2, 7]\n")
    assert served(tmp_path, "m", "2")
    assert reason(tmp_path, "m", "") == "model.toml: versions: no folder 7"


@pytest.mark.parametrize(("chosen", "versions"), [("'all'", {"2", "10"}), ("'latest'", {"10"}), ("[2]", {"2"})])
def test_versions(tmp_path: Path, chosen: str, versions: set[str]) -> None:
    """Versions are ordered as numbers; other folders are no versions."""
    for version in (2, 10):
        put(tmp_path, "m", branches(), version, toml=f"versions = {chosen}\n")
    for other in ("01", "v3", ".tmp", "0"):
        (tmp_path / "m" / other).mkdir()
    assert {version for _, version in scan(tmp_path, accelerator=False)} == versions


def test_bad_models_do_not_stop_the_others(tmp_path: Path) -> None:
    """Each bad model has its reason."""
    put(tmp_path, "good", branches())
    put(tmp_path, "truncated", branches().SerializeToString()[:50])
    put(tmp_path, "a b", branches())
    (tmp_path / "empty").mkdir()
    (tmp_path / "without" / "1").mkdir(parents=True)
    put(tmp_path, "fixed", branches(), toml="[batching]\n")
    found = scan(tmp_path, accelerator=False)
    bad = {entry.name: entry.reason for entry in found.values() if isinstance(entry, BadVersion)}
    assert set(bad) == {"truncated", "a b", "empty", "without", "fixed"}
    assert "first dimension" in bad["fixed"]
    assert isinstance(found["good", "1"], ServedVersion)
    with pytest.raises(OptionError, match="repository"):
        scan(tmp_path / "missing", accelerator=False)


def test_only_changed_files_are_read_again(tmp_path: Path) -> None:
    """A second scan returns the same entries, except those whose files have changed."""
    put(tmp_path, "a", branches())
    put(tmp_path, "b", branches())
    first = scan(tmp_path, accelerator=False)
    put(tmp_path, "b", free_branches())
    second = scan(tmp_path, accelerator=False, before=first)
    assert second["a", "1"] is first["a", "1"]
    assert second["b", "1"] != first["b", "1"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ("lru", "demand", "none")),
        ("cost", ("cost", "demand", "none")),
        ("lfu,deadline , fifo", ("lfu", "fifo", "deadline")),
    ],
)
def test_policies(text: str, expected: tuple[str, str, str]) -> None:
    """Names are of three kinds; those that are not given keep their default."""
    found = parse_policies(text, PolicySpec())
    assert (found.eviction, found.load_order, found.admission) == expected


@pytest.mark.parametrize("text", ["belady", "fast", "lru,cost"])
def test_wrong_policies(text: str) -> None:
    """Unknown names, two of one kind, and a policy that needs the future are refused."""
    with pytest.raises(OptionError):
        parse_policies(text, PolicySpec())


@pytest.mark.parametrize("place", ["beside", "below", "beside the target", "linked"])
def test_memory_includes_external_weights(place: str, tmp_path: Path) -> None:
    """Weights count wherever they are: in the version's folder, below it, or where links lead."""
    root, store = tmp_path / "models", tmp_path / "store"
    (folder := root / "m" / "1").mkdir(parents=True)
    weights = "data/w.bin" if place == "below" else "w.bin"
    saved = store if place in {"beside the target", "linked"} else folder
    (saved / weights).parent.mkdir(exist_ok=True)
    onnx.save_model(product(200), saved / "model.onnx", save_as_external_data=True, location=weights, size_threshold=0)
    if saved == store:
        for name in ("model.onnx", "w.bin")[: 2 if place == "linked" else 1]:
            (folder / name).symlink_to(store / name)
    size = (saved / "model.onnx").stat().st_size + 200 * 200 * 4
    found = served(root, "m")
    assert found.sources[0].model_bytes == size
    assert found.managed.variants[0].bytes[HOST] == round(size * 1.1) + 4_000_000


def test_a_folder_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """The rest of the repository is served; here its path is too long for the system."""
    put(tmp_path, "m", product(4))
    folder = os.open(tmp_path / "m" / "1", os.O_RDONLY)
    for _ in range(20):
        os.mkdir("d" * 250, dir_fd=folder)
        inner = os.open("d" * 250, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = inner
    os.close(folder)
    (entry,) = scan(tmp_path, accelerator=False).values()
    assert isinstance(entry, ServedVersion)
    assert [Path(name).name for name, *_ in entry.files] == ["model.onnx"]


def test_a_scenario_gives_its_policies_and_memory(tmp_path: Path) -> None:
    """The server uses what was simulated, and refuses what it does not have."""
    assert scenario_policies("table7") == (PolicySpec(load_order="fifo", prefetch=False), 8_000_000_000)
    scenario = tmp_path / "s.toml"
    scenario.write_text("[policies]\neviction = 'belady'\n", encoding="utf-8")
    with pytest.raises(OptionError, match="future"):
        scenario_policies(str(scenario))
    scenario.write_text("[policies]\nby_speed = true\n", encoding="utf-8")
    with pytest.raises(OptionError, match="speeds"):
        scenario_policies(str(scenario))


@pytest.mark.parametrize(
    ("text", "address"), [("a:1", ("a", 1)), ("[::1]:80", ("::1", 80)), ("127.0.0.1:0", ("127.0.0.1", 0))]
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    """Host and port, IPv6 in brackets."""
    assert parse_address(text, "--http") == address


@pytest.mark.parametrize("text", ["", "8000", ":8000", "a:", "a:b", "a:70000", "a:-1"])
def test_wrong_addresses(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(OptionError, match="HOST:PORT"):
        parse_address(text, "--http")


def test_origins_are_as_browsers_send_them() -> None:
    """A scheme, a host and maybe a port, or an asterisk; nothing after them."""
    for text in ("*", "https://chat.example.org", "http://localhost:3000", "http://[::1]:8080"):
        assert parse_origin(text) == text
    for text in ("", "localhost:3000", "https://a.org/", "https://a.org/path", "null", "ftp://a.org", "https://"):
        with pytest.raises(OptionError, match="--cors"):
            parse_origin(text)
