"""Scenario files: defaults, refusals, and changes from the command line."""

import json
from pathlib import Path
from typing import Any

import pytest

from chrion.errors import InputError, OptionError, PlanError, ScenarioError
from chrion.serving.simulator.overrides import parameter_grid, parse_set, parse_sweep
from chrion.serving.simulator.run import simulate
from chrion.serving.simulator.scenario import Scenario, find_scenario, scenario_names
from chrion.serving.variants import Variant, VariantTable, from_plan, from_table

MODEL = """
[[models]]
name = "m"
[models.variants.gpu]
memory_mb = 1000
latency_ms = 20.0
[models.variants.hybrid]
memory_mb = 400.0
latency_ms = 24.0
gpu_busy_ms = 8.0
cpu_busy_ms = 30.0
cores = 2
"""
#: A model with one variant, to be completed.
ONE = '[[models]]\nname = "x"\nvariants.gpu = {latency_ms = 1, memory_mb = 1, '


def scenario(folder: Path, text: str, **sets: Any) -> Scenario:
    path = folder / "s.toml"
    path.write_text(text)
    return find_scenario(str(path)).changed(sets).build()


def plan(folder: Path, busy_ms: Any, *, plain: Any = None, **predicted: Any) -> Path:
    """Write a plan of one operator with these predicted figures, and return its path."""
    figures = {"latency_ms": 52.0, "memory_mb": 948.1, "resident_mb": 400.5, "cpu_only": None, **predicted}
    machine = {"cpu": "x", "cores": 8, "memory_mb": 1e4, "system": "x", "onnxruntime": "1", "accelerator": None}
    content = dict.fromkeys(("digest", "policy", "model"), "x") | dict.fromkeys(
        ("chunk", "slo_ms", "budget_mb", "accelerator")
    )
    content |= {"schema": "chrion.plan/1", "machine": machine, "shapes": {}, "alpha": 0.3, "estimated": 0, "cores": 3}
    content |= {
        "remarks": [],
        "operators": ["v"],
        "order": [0],
        "lanes": [0],
        "segments": [[0]],
        "segment_ms": [[0, 1]],
    }
    content["predicted"] = {**figures, "busy_ms": busy_ms, "lower_bound_ms": 0.0, "accelerator_only": plain}
    path = folder / "x.plan.json"
    path.write_text(json.dumps(content))
    return path


def test_all_lanes_of_the_accelerator_are_one_gpu(tmp_path: Path) -> None:
    """The busy times of three accelerator lanes add up, to at most the latency."""
    path = plan(tmp_path, [10.0, 5.0, 6.0, 8.0, 9.0], latency_ms=40.0)
    content = json.loads(path.read_text()) | {"streams": 3, "cores": 2}
    path.write_text(json.dumps(content))
    variant = from_plan("v", path, VariantTable())
    assert (variant.gpu_busy_ms, variant.core_busy_ms) == (27.0, (6.0, 5.0))
    content["predicted"]["latency_ms"] = 20.0
    path.write_text(json.dumps(content))
    assert from_plan("v", path, VariantTable()).gpu_busy_ms == 20.0


def test_an_empty_file_is_the_papers_nine_models(tmp_path: Path) -> None:
    """The defaults are nine models of Table 6 in three patterns on one server of 12 GB."""
    built = scenario(tmp_path, "")
    assert built.patterns == ("gpu", "latency-optimal", "memory-optimal")
    totals = [sum(m.variants[pattern].memory_mb for m in built.models) for pattern in built.patterns]
    assert totals == pytest.approx([13375.0, 8210.1, 6111.0])
    assert [server.gpu_memory_gb for server in built.servers] == [12.0]


@pytest.mark.parametrize("name", scenario_names())
def test_bundled_scenarios_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every bundled scenario serves all its requests; the path of a trace is relative to the current folder."""
    (tmp_path / "trace.csv").write_text("HashOwner,HashApp,HashFunction,Trigger,1,2\no,a,f,http,100,200\n")
    monkeypatch.chdir(tmp_path)
    source = find_scenario(name)
    replays = source.content["workload"]["kind"] == "azure-functions-2019"
    built = source.changed({"path": "trace.csv"} if replays else {"requests": 300}).build()
    assert [result.total.completed for result in simulate(built)] == [300] * len(built.patterns)


def test_table6_busy_times_follow_from_its_memory() -> None:
    """The catalogue's busy times follow from the share of cells on the GPU, which follows from the memory of a plan."""
    cpu_ms = {"baseline": 70.6, "layers-8": 47.1, "layers-16": 94.1, "batch-1": 65.9, "batch-2": 63.3}
    cpu_ms |= {"batch-4": 67.0, "io-32": 61.5, "seq-32": 23.7, "seq-64": 47.1}
    models = find_scenario("table7").build().models
    assert {model.name for model in models} == set(cpu_ms)
    for model in models:
        whole = model.variants["gpu"]
        for pattern in ("latency-optimal", "memory-optimal"):
            variant = model.variants[pattern]
            share = (variant.memory_mb - 345) / (whole.memory_mb - 345)
            assert variant.gpu_busy_ms == pytest.approx(share * whole.latency_ms, abs=0.051)
            assert sum(variant.core_busy_ms) == pytest.approx((1 - share) * cpu_ms[model.name], abs=0.051)


def test_variant_from_a_table() -> None:
    """GPU time defaults to the latency, load to the memory; CPU time is shared by the cores."""
    assert from_table("gpu", VariantTable(memory_mb=5, latency_ms=2)) == Variant("gpu", 5.0, 2.0, 2.0, (), 5.0)
    hybrid = from_table("h", VariantTable(memory_mb=5, latency_ms=4, gpu_busy_ms=1, cpu_busy_ms=6, cores=2))
    assert hybrid.core_busy_ms == (3.0, 3.0)
    assert from_table("c", VariantTable(memory_mb=0, latency_ms=4, cpu_busy_ms=4)).gpu_busy_ms == 0


def test_variant_from_a_plan(tmp_path: Path) -> None:
    """A variant has a plan's predicted latency and memory; lane 0 is the GPU, and idle CPU lanes take no core."""
    path = plan(tmp_path, [27.5, 10.0, 0.0, 37.8])
    variant = from_plan("latency-optimal", path, VariantTable(jitter_cv=0.1))
    assert variant == Variant("latency-optimal", 948.1, 52.0, 27.5, (37.8, 10.0), 948.1, "lognormal", 0.1)


def test_memory_of_a_plan(tmp_path: Path) -> None:
    """The memory of a variant can be what an arena must hold; the size of a load can be given."""
    path = plan(tmp_path, [27.5, 10.0])
    resident = from_plan("x", path, VariantTable(memory="resident"))
    assert (resident.memory_mb, resident.load_mb) == (400.5, 400.5)
    assert from_plan("x", path, VariantTable(load_mb=300)).load_mb == 300


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"busy_ms": None}, "damaged plan"),
        ({"busy_ms": []}, "no busy time on the GPU or on a core"),
        ({"busy_ms": [float("nan"), 1.0]}, "damaged plan"),
        ({"busy_ms": [1.0, -1.0]}, "damaged plan"),
        ({"busy_ms": [1.0], "latency_ms": "fast"}, "damaged plan"),
        ({"busy_ms": [1.0], "latency_ms": 0.0}, "latency_ms: expected above 0"),
        ({"busy_ms": [1.0], "memory_mb": float("inf")}, "damaged plan"),
    ],
)
def test_damaged_plans(tmp_path: Path, figures: Any, message: str) -> None:
    """A plan without the figures of a variant is refused."""
    with pytest.raises(PlanError, match=message):
        from_plan("x", plan(tmp_path, **figures), VariantTable())


@pytest.mark.parametrize("content", ["{}", "[]", '{"model": "x"}', "null"])
def test_a_json_file_that_is_no_plan_has_no_schema(content: str, tmp_path: Path) -> None:
    """The message says that a schema is missing, instead of naming Python's None."""
    (tmp_path / "x.plan.json").write_text(content)
    with pytest.raises(PlanError, match=r"expected a file of schema chrion.plan/1, found no schema"):
        scenario(tmp_path, MODEL + '[models.variants.chrion]\nplan = "x.plan.json"\n')


def test_plan_files_are_variants_of_a_scenario(tmp_path: Path) -> None:
    """A variant can name a plan file, relative to the scenario."""
    plan(tmp_path, [4.0, 9.0], memory_mb=300.0)
    built = scenario(tmp_path, MODEL + '[models.variants.chrion]\nplan = "x.plan.json"\n')
    assert built.patterns == ("gpu", "hybrid", "chrion")
    assert built.models[0].variants["chrion"].memory_mb == 300.0


def test_a_plan_file_also_has_the_plain_variant(tmp_path: Path) -> None:
    """A plan's figures for the whole model on the accelerator, if there are any, make a GPU-only variant."""
    plain = {"latency_ms": 59.0, "memory_mb": 1643.0, "resident_mb": 500.0}
    path = plan(tmp_path, [27.0, 37.0], plain=plain)
    plain_gpu = from_plan("gpu", path, VariantTable(part="accelerator_only"))
    assert plain_gpu == Variant("gpu", 1643.0, 59.0, 59.0, (), 1643.0)
    assert from_plan("gpu", path, VariantTable(part="accelerator_only", memory="resident")).memory_mb == 500.0
    with pytest.raises(PlanError, match="no figures for accelerator_only"):
        from_plan("gpu", plan(tmp_path, [0.0, 37.0]), VariantTable(part="accelerator_only"))


def test_copies_alternate_and_share_a_family(tmp_path: Path) -> None:
    """Copies are separate models; the first copies of all families come before the second ones."""
    built = scenario(
        tmp_path, MODEL + '[[models]]\nname = "n"\nvariants.gpu = {memory_mb = 1, latency_ms = 1}', copies=2
    )
    assert [model.name for model in built.models] == ["m#1", "n#1", "m#2", "n#2"]
    assert [model.family for model in built.models] == ["m", "n", "m", "n"]
    assert built.patterns == ("gpu",)


def test_objectives(tmp_path: Path) -> None:
    """A model's own objective comes first, then the scenario's, then a multiple of a variant's latency."""
    assert scenario(tmp_path, MODEL).models[0].slo_ms == 40.0
    assert scenario(tmp_path, MODEL, **{"slo.factor": 3, "slo.of": "hybrid"}).models[0].slo_ms == 72.0
    assert scenario(tmp_path, MODEL, **{"slo.latency_ms": 50}).models[0].slo_ms == 50.0
    assert scenario(tmp_path, MODEL, **{"slo.latency_ms": 50, "slo_ms": 60}).models[0].slo_ms == 60.0


def test_variant_defaults(tmp_path: Path) -> None:
    """[variants.NAME] has the defaults of every model's variant of that name."""
    built = scenario(tmp_path, MODEL + "[variants.gpu]\njitter_cv = 0.5\nlatency_ms = 1.0\n")
    variants = built.models[0].variants
    assert (variants["gpu"].jitter_cv, variants["gpu"].latency_ms, variants["hybrid"].jitter_cv) == (0.5, 20.0, 0.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "not a scenario"),
        ("sed = 1", "unknown key 'sed' (did you mean 'seed'?)"),
        ("seed = -1", "seed: expected a whole number of at least 0"),
        ("preload = 1", "preload: expected true or false"),
        ("description = 1", "description: expected text"),
        ("name = []", "name: expected text"),
        ('catalogue = "table9"', "catalogue = 'table9': table9.toml not found"),
        ('use = ["baselin"]', "unknown key 'baselin' (did you mean 'baseline'?)"),
        ("[workload]\nrate_per_s = -3.0", "workload.rate_per_s: expected a number above 0"),
        ("[workload]\nrate_per_s = inf", "workload.rate_per_s: expected a number of at most 1e+12"),
        ("[workload]\nrate_per_s = nan", "workload.rate_per_s: expected a number above 0"),
        ("[workload]\nrate_per_s = 1e-320", "workload.rate_per_s: expected a number above 0, at least 1e-09"),
        ("[workload]\nzipf_exponent = 1e308", "workload.zipf_exponent: expected a number of at most 1e+12"),
        (f"[workload]\nrequests = 1{'0' * 400}", "expected a whole number of at most 1e+10"),
        ("[[servers]]\ncount = 20000", "servers[0].count: expected a whole number of at most 10000"),
        ('[workload]\nrate_per_s = "5"', "workload.rate_per_s: expected a number"),
        ("[workload]\nrequests = true", "workload.requests: expected a whole number"),
        ('[workload]\nkind = "weibull"', "workload.kind: expected one of uniform, poisson"),
        ('[workload]\nkind = "csv"\npath = "none.csv"', "none.csv: No such file"),
        ('[policies]\neviction = "fifo"', "policies.eviction: expected one of lru, lfu, cost, belady"),
        ('[policies]\nevicton = "lru"', "policies: unknown key 'evicton' (did you mean 'eviction'?)"),
        (
            '[policies]\nadmission = "deadline"\n[slo]\nmeasure = "execution"',
            "policies.admission = 'deadline' requires slo.measure = 'response'",
        ),
        ("[[servers]]\ngpu_memory_gb = 2.0", "variant gpu needs 2075 MB, the largest server has 2000 MB for models"),
        ("[[servers]]\nreserved_gb = 13.0", "servers.reserved_gb = 13: exceeds gpu_memory_gb"),
        ("[[servers]]\ngpu_slots = 0", "needs 1643 MB, a GPU slot; no server has all of them"),
        ("[[servers]]\ncpu_cores = 0", "a GPU slot, 1 core; no server has all of them"),
        ("servers = 3", "servers: expected a list"),
        (
            'patterns = ["fast"]',
            "pattern 'fast' is not one of its variants (known: gpu, latency-optimal, memory-optimal)",
        ),
        ("patterns = []", "patterns: expected a list"),
        (
            ONE + 'cores = 0}\n[[models]]\nname = "y"\nvariants.fast = {latency_ms = 1, memory_mb = 1}',
            "models: no variant is common to all models (x: gpu; y: fast)",
        ),
        ('[slo]\nof = "fast"', "slo.of = 'fast': model baseline has no variant of that name"),
        ("patterns = [[1]]", "patterns[0]: expected text"),
        ("[variants.gpuu]\njitter_cv = 0.1", "variants: unknown key 'gpuu' (did you mean 'gpu'?)"),
        (MODEL + MODEL, "models: duplicate name 'm'"),
        (
            MODEL + '[models.variants.x]\nplan = "x.plan.json"\npart = "gpu"',
            "part: expected one of plan, accelerator_only",
        ),
        (MODEL + '[models.variants.x]\nplan = "x.plan.json"\nlatency_ms = 1', "latency_ms: the plan file provides it"),
        ("[[models]]\ncopies = 2", "name is missing"),
        ('[[models]]\nname = "x"', "models.x: expected tables [models.variants.NAME]"),
        ('[[models]]\nname = "x"\nvariants.gpu = {latency_ms = 1}', "models.x: variant gpu: memory_mb is missing"),
        (
            '[[models]]\nname = "x"\nvariants.gpu = {latency_ms = 1, memory_mb = "1"}',
            "models.x.variants.gpu.memory_mb: expected a number",
        ),
        (
            '[[models]]\nname = "x"\nvariants.gpu = {latency_ms = 1, memory_mb = -1}',
            "models.x.variants.gpu.memory_mb: expected a number of at least 0",
        ),
        (
            '[[models]]\nname = "x"\nvariants.gpu = {latency_ms = 1, memory_mb = 1, gpu_busy_ms = 2}',
            "a lane is busy for 2 ms, longer than the latency",
        ),
        (
            '[[models]]\nname = "x"\nvariants.gpu = {latency_ms = 1, memory_mb = 1, distribution = "normal"}',
            "models.x.variants.gpu.distribution: expected one of constant, lognormal, exponential",
        ),
        (ONE + "cores = 1.5, cpu_busy_ms = 1}", "models.x.variants.gpu.cores: expected a whole number"),
        (ONE + "cores = -1}", "variants.gpu.cores: expected a whole number of at least 0"),
        (ONE + "cores = 0, cpu_busy_ms = 1}", "variant gpu: cores: expected 1 or more"),
        (ONE + "cpu_busy_ms = nan}", "variants.gpu.cpu_busy_ms: expected a number of at least 0"),
        (ONE + f"load_mb = 1{'0' * 400}}}", "load_mb: expected a number of at most 1e+12, found 1000"),
        (ONE + "load_mb = 2024-01-01}", "models.x.variants.gpu.load_mb: expected a number"),
        (ONE + "jitter_cv = 1e200}", "variants.gpu.jitter_cv: expected a number of at most 1e+12"),
        (
            ONE + 'memory = "resident"}',
            "models.x.variants.gpu.memory = 'resident': only for a variant with the key 'plan'",
        ),
        ('[[models]]\nname = "x"\nvariants.gpu = {plan = "none.plan.json"}', "none.plan.json: cannot be read"),
    ],
)
def test_bad_scenarios(tmp_path: Path, text: str, message: str) -> None:
    """An invalid scenario is refused when it is read; the message names the key, its value and what is expected."""
    with pytest.raises(InputError) as caught:
        scenario(tmp_path, text)
    assert message in str(caught.value)


def test_pinned_models_must_leave_room(tmp_path: Path) -> None:
    """Pinned models that leave too little memory for another model are refused."""
    text = "".join(
        MODEL.replace('"m"', f'"{name}"\npinned = {pinned}') for name, pinned in (("a", "true"), ("b", "false"))
    )
    with pytest.raises(ScenarioError, match=r"models.b: variant gpu needs 1000 MB, too much beside the pinned"):
        scenario(tmp_path, text, gpu_memory_gb=1.9)
    assert scenario(tmp_path, text, gpu_memory_gb=2.0).models[0].spec.pinned


def test_servers_without_a_gpu(tmp_path: Path) -> None:
    """A server without a GPU gets only the requests that it can run."""
    text = "[[servers]]\n[[servers]]\ngpu_memory_gb = 0.0\ngpu_slots = 0\ncpu_cores = 1\n" + MODEL
    text += "[models.variants.cpu]\nmemory_mb = 0.0\nlatency_ms = 90.0\ncpu_busy_ms = 90.0\n"
    built = scenario(tmp_path, text, requests=200, admission="deadline", rate_per_s=50.0, factor=10)
    served = {r.pattern: [server.arrivals for server in r.servers] for r in simulate(built)}
    assert served["gpu"] == served["hybrid"] == [200, 0]
    assert all(served["cpu"])


def test_no_such_scenario() -> None:
    """The message about an unknown name lists the bundled scenarios."""
    with pytest.raises(ScenarioError, match=r"scenario 'nonesuch' not found: .* \(bundled: .*table7"):
        find_scenario("nonesuch")


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("gpu_memory_gb", 8.0, lambda s: s.servers[0].gpu_memory_gb),
        ("servers.count", 3, lambda s: len(s.servers)),
        ("seed", 7, lambda s: s.seed),
        ("eviction", "lfu", lambda s: s.policies.eviction),
        ("models.seq-64.copies", 4, lambda s: len(s.models) - 8),
        ("models.baseline.variants.gpu.latency_ms", 61.0, lambda s: s.models[0].variants["gpu"].latency_ms),
        ("variants.gpu.jitter_cv", 0.3, lambda s: s.models[3].variants["gpu"].jitter_cv),
        ("jitter_cv", 0.2, lambda s: s.models[3].variants["memory-optimal"].jitter_cv),
        ("use", ["seq-32", "seq-64"], lambda s: [m.name for m in s.models]),
    ],
)
def test_sets(tmp_path: Path, key: str, value: Any, found: Any) -> None:
    """A change is given by a path, or by a bare key that one section has."""
    assert found(scenario(tmp_path, "", **{key: value})) == value


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("colour", "unknown key 'colour'"),
        ("latency_ms", "ambiguous key 'latency_ms': expected one of variants.latency_ms, slo.latency_ms"),
        ("cluster.colour", "unknown section 'cluster'"),
        ("models.nonesuch.copies", "the scenario has no entry of that name"),
        ("servers.colour", r"servers\[0\]: unknown key 'colour'"),
    ],
)
def test_unknown_keys_of_changes(tmp_path: Path, key: str, message: str) -> None:
    """An unknown or ambiguous key is refused."""
    with pytest.raises(InputError, match=message):
        scenario(tmp_path, "", **{key: 1})


def test_a_change_to_variants_that_are_no_table(tmp_path: Path) -> None:
    """A value in the place of the table of variants is refused."""
    with pytest.raises(InputError, match="the scenario has no entry of that name"):
        scenario(tmp_path, '[[models]]\nname = "x"\nvariants = 3\n', jitter_cv=0.1)


def test_parse_set_and_sweep() -> None:
    """Values are read as TOML if possible, else as text; a sweep lists values, and several sweeps make a grid."""
    assert parse_set("a.b=8") == ("a.b", 8)
    assert parse_set("preload=true") == ("preload", True)
    assert parse_set("eviction=lfu") == ("eviction", "lfu")
    assert parse_sweep("gpu_memory_gb=4,8.5") == ("gpu_memory_gb", (4, 8.5))
    assert parameter_grid([("a", (1, 2)), ("b", ("x", "y"))])[1] == {"a": 1, "b": "y"}
    assert len(parameter_grid([("a", (1, 2)), ("b", ("x", "y"))])) == 4


@pytest.mark.parametrize("text", ["a", "=1", "a="])
def test_malformed_set(text: str) -> None:
    """A change without a key, an equals sign or a value is refused."""
    with pytest.raises(OptionError, match="expected key=value"):
        parse_set(text)
    with pytest.raises(OptionError, match="expected key=value"):
        parse_sweep(text)


SHRINKING = """
shrink = ["large", "small"]
[[models]]
name = "a"
variants.large = {memory_mb = 800, latency_ms = 10}
variants.small = {memory_mb = 300, latency_ms = 12}
[[models]]
name = "b"
variants.large = {memory_mb = 700, latency_ms = 10}
variants.small = {memory_mb = 700, latency_ms = 12}
"""


def test_shrinking_is_a_pattern(tmp_path: Path) -> None:
    """The key ``shrink`` adds a pattern, whose models need to fit in their smallest variants only."""
    (tmp_path / "s.toml").write_text(SHRINKING)
    scenario = find_scenario(str(tmp_path / "s.toml")).changed({"gpu_memory_gb": 1.0}).build()
    assert scenario.patterns == ("large", "small", "shrink")
    assert scenario.levels("shrink") == ("large", "small")
    assert scenario.models[0].slo_ms == 20
    small = find_scenario(str(tmp_path / "s.toml")).changed({"gpu_memory_gb": 0.7, "patterns": ["shrink"]}).build()
    assert small.engine_config("shrink").smaller[0][0].memory_mb == 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shrink": ["large"]}, r"shrink: expected a list of two or more"),
        ({"shrink": "large"}, "shrink: expected a list"),
        ({"shrink": ["small", "large"]}, "models.a: variant 'large' needs 800 MB, more than 'small' with 300 MB"),
        ({"shrink": ["large", "tiny"]}, r"models.a has no variant 'tiny' \(known: large, small\)"),
        ({"shrink": [], "patterns": ["shrink"]}, "'shrink' needs the key shrink"),
        ({"gpu_memory_gb": 0.6}, "models.b: variant small needs 700 MB"),
    ],
)
def test_bad_shrinking(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    """A list that cannot be a sequence of smaller and smaller variants is refused."""
    (tmp_path / "s.toml").write_text(SHRINKING)
    source = find_scenario(str(tmp_path / "s.toml")).changed({"patterns": ["shrink"], **change})
    with pytest.raises(ScenarioError, match=message):
        source.build()
