"""``chrion multi``."""

from __future__ import annotations

import math
import os.path
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from chrion.cli import outputs
from chrion.cli.console import note, show, show_json, step
from chrion.cli.exit_codes import OUT_OF_REACH
from chrion.cli.option_groups import CostOptions
from chrion.cli.options import CoresOption, ForceOption, JsonOption, ShapeOption, complete_hardware
from chrion.common.files import write_atomically
from chrion.common.suggestions import did_you_mean
from chrion.common.units import format_shape, parse_duration_ms, parse_shape
from chrion.errors import OptionError
from chrion.graph import load as load_graph
from chrion.graph.reading import read_model
from chrion.machine.cores import physical_cores
from chrion.profiler.interference import UsageMonitor
from chrion.profiler.synthetic_inputs import synthetic_array
from chrion.report.lane_chart import chrome_trace
from chrion.report.load_tables import block_chart, load_line, load_table
from chrion.report.tables import BUSY_VERDICT, estimated_lines
from chrion.runtime.block_chain import why_whole
from chrion.serving.multi.estimated_models import EstimatedModels
from chrion.serving.multi.lane_models import LaneModels
from chrion.serving.multi.load import LoadResult, find_factor, measure, measure_times, predict, summarise
from chrion.serving.multi.policies import POLICIES
from chrion.serving.multi.session import MultiSession
from chrion.serving.multi.simulation import LOADS, Arrival, build_arrivals
from chrion.serving.multi.virtual_lanes import BlockTimes

_POLICY_HELP = f"Who runs next: {', '.join(POLICIES)}."


def multi(
    models: Annotated[list[Path], typer.Argument(help="ONNX models.", metavar="MODEL", show_default=False)],
    *,
    rates: Annotated[str, typer.Option(metavar="30,60", help="Tasks per second: one for each model, or one for all.")],
    deadline: Annotated[
        str | None, typer.Option(metavar="50ms", help="Time that a task has: one for each model, or one for all.")
    ] = None,
    policy_name: Annotated[
        str | None,
        typer.Option("--policy", metavar="NAME", help=_POLICY_HELP, show_default="edf with a deadline, else fair"),
    ] = None,
    priorities: Annotated[
        str | None,
        typer.Option(metavar="0,1", help="Priority of each model for --policy priority; 0 is the highest."),
    ] = None,
    queue: Annotated[int, typer.Option(metavar="N", min=1, help="Maximum waiting tasks of a model.")] = 64,
    drop: Annotated[str, typer.Option(metavar="newest|oldest", help="The task that a full queue drops.")] = "newest",
    drop_late: Annotated[
        bool, typer.Option("--drop-late", help="Drop tasks that cannot meet their deadline any more.")
    ] = False,
    background: Annotated[
        bool,
        typer.Option(
            "--background", help="Serve whole models side by side: those of later deadlines in the background (Linux)."
        ),
    ] = False,
    accelerator: Annotated[
        str | None,
        typer.Option(
            metavar="cuda,none",
            help="Execution provider of each model, or one for all; none for blocks on the CPU.",
            show_default="none",
        ),
    ] = None,
    shape: ShapeOption = None,
    hardware: Annotated[
        str | None,
        typer.Option(
            metavar="epyc-16",
            autocompletion=complete_hardware,
            help="Estimate costs from the datasheet of a processor: a name of `chrion hardware`, or a TOML file.",
        ),
    ] = None,
    load: Annotated[str, typer.Option(metavar="NAME", help=f"How tasks arrive: {', '.join(LOADS)}.")] = "periodic",
    block: Annotated[
        str | None,
        typer.Option(
            metavar="5ms",
            help="Limit of a block's time.",
            show_default="2ms to 5ms, by the shortest deadline",
        ),
    ] = None,
    cores: CoresOption = None,
    duration: Annotated[str, typer.Option(metavar="10s", help="Length of the load.")] = "10s",
    find: Annotated[
        bool, typer.Option("--find", help="Find the highest rates in the given proportion, and measure them.")
    ] = False,
    trace: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a trace for Perfetto as JSON.")] = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find out whether this machine sustains several models at given rates.

    Tasks are served by a MultiSession, on a virtual clock and then in real time; with --hardware on the virtual clock
    only, by the sums of estimated costs of operators.
    Exit code 3: more than 1 % of a model's tasks miss their deadline or are dropped, or tasks pile up.
    """
    names = _names(models)
    paths = dict(zip(names, models, strict=True))
    asked = dict(zip(names, _numbers(rates, len(names)), strict=True))
    if priorities and policy_name != "priority":
        raise OptionError("--priorities: only with --policy priority")
    ranks = _ranks(priorities, len(names)) if priorities else []
    deadlines = dict(zip(names, _each("--deadline", deadline, len(names)), strict=True)) if deadline else None
    providers = dict(zip(names, _each("--accelerator", accelerator or "none", len(names)), strict=True))
    seconds = parse_duration_ms(duration, "--duration") / 1e3
    targets = outputs.check_outputs({"--trace": trace}, force=force)
    if load not in LOADS:
        raise OptionError(f"--load: unknown load {load!r}", hint=did_you_mean(load, LOADS))
    options: dict[str, Any] = {
        "rates": asked,
        "deadlines": deadlines,
        "policy": policy_name,
        "priorities": dict(zip(names, ranks, strict=True)) if ranks else None,
        "queue": queue,
        "drop": drop,
        "drop_late": drop_late,
        "background": background,
        "block": block,
    }
    shapes = _shapes(shape or [], {name: path for name, path in paths.items() if providers[name] == "none"})
    given = _Load(asked, seconds, load, find=find)
    if hardware is not None:
        for option, value in (("--accelerator", accelerator), ("--trace", trace)):
            if value is not None:
                raise OptionError(f"{option}: not allowed with --hardware, which runs no model")
        costs = CostOptions(hardware=hardware, cores=cores)
        estimated, lines = _estimate(paths, shapes, costs, options)
        per_s, _, result = given.predict(estimated, estimated.times)
        _show(estimated, per_s, {"estimated": result}, lines, {}, as_json=as_json)
        raise typer.Exit(0 if result.sustained else OUT_OF_REACH)
    with step(f"opening {', '.join(names)}" if background else f"cutting {', '.join(names)} into blocks"):
        session = MultiSession(paths, accelerators=providers, cores=cores, shapes=shapes, **options)
    for name, inputs in session.inputs.items():
        if free := [f"{info.name} ({format_shape(info.shape)})" for info in inputs if info.free and info.shape]:
            note(f"warning: {name}: free dimensions have size 1: {', '.join(free)}; --shape gives other sizes")
    with session:
        feeds = {name: {i.name: synthetic_array(i) for i in inputs} for name, inputs in session.inputs.items()}
        monitor = UsageMonitor(physical_cores())
        with step("measuring models while all cores are busy"):
            times = measure_times(session, feeds)
        per_s, arrivals, predicted = given.predict(session, times)
        with step(f"measuring {len(arrivals)} tasks in {seconds:g} s"):
            served, spans = measure(session, feeds, arrivals)
        busy = monitor.has_interference()
    measured = summarise(served, spans, arrivals, session.lanes)
    if trace:
        write_atomically(trace, chrome_trace([block_chart("measured", spans, session.cpu_lanes)]))
    messages = [*([BUSY_VERDICT] if busy else []), *(target.message for target in targets)]
    shapes_used = {name: {key: list(array.shape) for key, array in feed.items()} for name, feed in feeds.items()}
    conditions = {"shapes": shapes_used, "interference": busy}
    _show(session, per_s, {"predicted": predicted, "measured": measured}, messages, conditions, as_json=as_json)
    raise typer.Exit(0 if measured.sustained else OUT_OF_REACH)


@dataclass(frozen=True, slots=True)
class _Load:
    """The load that is asked for."""

    rates: dict[str, float]
    seconds: float
    #: How tasks arrive.
    name: str
    find: bool

    def predict(self, session: LaneModels, times: BlockTimes) -> tuple[dict[str, float], Sequence[Arrival], LoadResult]:
        """Return the rates, with ``--find`` the highest ones, their tasks, and the figures as predicted.

        Raises:
            OptionError: No multiple of the rates is sustained.
        """
        factor = 1.0
        if self.find:
            with step("searching for the highest rates"):
                factor = find_factor(session, self.rates, self.seconds, times, self.name)
        if not factor:
            text = ",".join(f"{rate:g}" for rate in self.rates.values())
            raise OptionError(f"--find: no multiple of the rates {text} is sustained", hint="allow more time")
        rates = {name: factor * rate for name, rate in self.rates.items()}
        arrivals = build_arrivals(rates, self.seconds, self.name)
        return rates, arrivals, predict(session, arrivals, times)


def _estimate(
    paths: Mapping[str, Path], shapes: Mapping[str, dict[str, Any]], costs: CostOptions, options: Mapping[str, Any]
) -> tuple[EstimatedModels, list[str]]:
    """Return models with estimated costs, and a line that says so.

    Raises:
        ModelError: A model cannot be read.
        ShapeError: An input has a free dimension.
        OptionError: The machine has an accelerator, which has no part in this.
    """
    graphs = {name: load_graph(path, shapes.get(name)) for name, path in paths.items()}
    profiles = {name: costs.find_profile(graph) for name, graph in graphs.items()}
    if any(profile.accelerator for profile in profiles.values()):
        hint = "name the processor alone, for example epyc-16"
        raise OptionError(f"--hardware {costs.hardware}: models run in blocks on CPU cores", hint=hint)
    known = {name: (graph.dag, profiles[name].costs(graph.dag)) for name, graph in graphs.items()}
    operators = sum(len(graph.dag) for graph in graphs.values())
    machine = next(iter(profiles.values())).machine
    whole = {name: reason for name, graph in graphs.items() if (reason := why_whole(graph))}
    return EstimatedModels(known, whole, **options), estimated_lines(operators, operators, machine)


def _show(
    session: LaneModels,
    per_s: Mapping[str, float],
    results: Mapping[str, LoadResult],
    messages: Sequence[str],
    conditions: Mapping[str, Any],
    *,
    as_json: bool,
) -> None:
    """Print results, with messages, or as JSON with the conditions under which they were measured."""
    if as_json:
        content = {title: _plain(result) for title, result in results.items()}
        show_json({"policy": session.policy, "lanes": session.lanes, "rates": per_s, **content, **conditions})
    else:
        lines = [load_line(title, result) for title, result in results.items()]
        show(session.explain(), load_table(per_s, results), *lines, *messages)


def _names(models: list[Path]) -> list[str]:
    """Return a name for each model: the stem of its file.

    If stems repeat, the names are those of the nearest folders of which all differ and none is a version, or else the
    stems, numbered.
    """
    stems = [path.stem for path in models]
    if len(set(stems)) == len(models):
        return stems
    paths = (Path(os.path.abspath(path)) for path in models)  # noqa: PTH100 - without following links
    above = (tuple(folder.name for folder in path.parents) for path in paths)
    for names in zip(*above, strict=False):
        if len(set(names)) == len(models) and all(name and not name.isdecimal() for name in names):
            return list(names)
    numbered: list[str] = []
    for stem in stems:
        name, count = stem, 1
        while name in numbered:
            count += 1
            name = f"{stem}-{count}"
        numbered.append(name)
    return numbered


def _shapes(texts: Sequence[str], models: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Return the shapes of each model that has an input or a free dimension of their names.

    Raises:
        OptionError: No model has one.
        ModelError: A model cannot be read.
    """
    shapes: dict[str, dict[str, Any]] = {name: {} for name in models}
    known = {name: _named(path) if texts else frozenset() for name, path in models.items()}
    for part, shape in map(parse_shape, texts):
        owners = [name for name in models if part in known[name]]
        if not owners:
            raise OptionError(f"--shape: no model in blocks has an input or a free dimension {part!r}")
        for name in owners:
            shapes[name][part] = shape
    return {name: own for name, own in shapes.items() if own}


def _named(path: Path) -> frozenset[str]:
    """Return the names of a model's inputs and of their free dimensions."""
    inputs = read_model(path)[0].graph.input
    dimensions = {d.dim_param for info in inputs for d in info.type.tensor_type.shape.dim}
    return frozenset({info.name for info in inputs} | dimensions)


def _each(option: str, text: str, count: int) -> list[str]:
    """Return the parts of a list, one for each model.

    Raises:
        OptionError: There are neither one nor as many as models.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) not in {1, count}:
        raise OptionError(f"{option} {text}: expected 1 or {count} values, one for each model, found {len(parts)}")
    return parts * count if len(parts) == 1 else parts


def _numbers(text: str, count: int) -> list[float]:
    """Return the rates.

    Raises:
        OptionError: One is not a number above zero.
    """
    numbers = []
    for part in _each("--rates", text, count):
        try:
            number = float(part)
        except ValueError:
            number = math.nan
        if not (math.isfinite(number) and number > 0):
            raise OptionError(f"--rates {text}: {part!r} is not a number above zero", hint="for example 30,60,120")
        numbers.append(number)
    return numbers


def _ranks(text: str, count: int) -> list[int]:
    """Return priorities.

    Raises:
        OptionError: One is no whole number of at least 0.
    """
    parts = _each("--priorities", text, count)
    if odd := next((part for part in parts if not part.isdecimal()), None):
        raise OptionError(f"--priorities {text}: {odd!r} is not a whole number of at least 0", hint="for example 0,1,1")
    return [int(part) for part in parts]


def _plain(result: LoadResult) -> dict[str, Any]:
    """Return a result as JSON has it: null for latencies that there are none of."""
    content = asdict(result)
    for own in content["models"].values():
        own |= {name: None for name in ("p50_ms", "p99_ms") if math.isnan(own[name])}
    return content
