"""Groups of options that several commands share.

A command takes a group as a parameter whose type is one of these classes; :func:`expand_groups` gives it an option for
each field. A group is checked when it is created, before the command begins.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from chrion import zoo
from chrion.cli.console import log, note, step
from chrion.cli.options import (
    AcceleratorOption,
    AlphaOption,
    CoresOption,
    GpuBudgetOption,
    HardwareOption,
    MaxErrorOption,
    ModelArgument,
    PrecisionOption,
    ShapeOption,
    SloOption,
    StreamsOption,
    complete_policy,
)
from chrion.common.units import format_shape, format_share, parse_shape
from chrion.devices import usable_provider
from chrion.devices.providers import CPU_PROVIDER
from chrion.errors import ModelError, OptionError, PlanError, ShapeError
from chrion.graph import Graph, load
from chrion.hardware import hardware as find_hardware
from chrion.machine.cores import check_cores
from chrion.profiler import Profile, profile
from chrion.profiler.hardware_profile import estimate_profile, require_processor
from chrion.profiler.interference import OTHERS_USED_CORES
from chrion.profiler.precision import check_max_error, check_precision
from chrion.profiler.profiles import stored_profiles
from chrion.profiler.synthetic_inputs import synthetic_inputs
from chrion.report.benchmark.feeds import read_arrays, read_feed, run_plain
from chrion.report.benchmark.latency import Feed
from chrion.scheduler import DEFAULT_POLICY, Plan, SolutionPolicy, policy_names
from chrion.scheduler.plan_options import PlanOptions
from chrion.scheduler.planner import alternatives
from chrion.scheduler.policies.registry import find_policy
from chrion.scheduler.policies.stages import StageMeter


def expand_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with a parameter for each field of its groups."""
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        if dataclasses.is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation  # type: ignore[assignment] # the class, not an instance
            parameters += _fields(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def expanded(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in dataclasses.fields(group)})
        command(**values)

    expanded.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined] # Typer reads it
    return expanded


def _fields(group: Any) -> Iterator[inspect.Parameter]:
    """Yield a parameter for each field of a group."""
    hints = get_type_hints(group, include_extras=True)
    for field in dataclasses.fields(group):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        kind = inspect.Parameter.KEYWORD_ONLY
        yield inspect.Parameter(field.name, kind, default=default, annotation=hints[field.name])


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """A model and the shapes of its inputs."""

    path: ModelArgument
    shape: ShapeOption = None

    def __post_init__(self) -> None:
        self._shapes()  # checks them
        if (name := str(self.path)) in zoo.names() and not self.path.exists():
            raise ModelError(f"{name}: no such file", hint=f"chrion model {name} -o {name}.onnx writes the zoo's model")

    def load(self, plan: Plan | None = None) -> Graph:
        """Load the model; shapes that ``--shape`` leaves are those of a plan."""
        graph = load_planned(self.path, plan, self._shapes()) if plan else load(self.path, self._shapes())
        if empty := [
            f"{info.name} ({format_shape(info.shape)})" for info in graph.inputs if info.shape and 0 in info.shape
        ]:
            more = f" and {len(empty) - 1} more" if len(empty) > 1 else ""
            note(f"warning: a size of 0 leaves {empty[0]}{more} without elements; what follows is for such a request")
        log.info("%s: %d operators", self.path, len(graph.dag))
        return graph

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        given = [parse_shape(text) for text in self.shape or ()]
        names = [name for name, _ in given]
        if twice := [name for name in names if names.count(name) > 1]:
            raise OptionError(
                f"--shape: {twice[0]} is given {names.count(twice[0])} times", hint="give one shape a name"
            )
        return dict(given)


def load_planned(path: Path, plan: Plan, given: Mapping[str, tuple[int, ...]] | None = None) -> Graph:
    """Load the model of a plan, for the shapes of the plan where no others are given.

    Raises:
        PlanError: The plan is for another model, or for other shapes.
        ShapeError: A given shape does not fit the model.
    """
    given = given or {}
    try:
        graph = load(path, {**plan.shapes, **given})
    except ShapeError as error:
        load(path, given)  # refuses a given shape that does not fit
        raise PlanError(
            f"plan of {plan.model!r} does not fit model {path}: {error.message}", hint=error.hint
        ) from error
    plan.apply(graph)  # refuses another plan before anything is measured
    return graph


@dataclass(frozen=True, slots=True)
class InputOptions(ModelOptions):
    """A model and its inputs."""

    feed: Annotated[
        Path | None,
        typer.Option(
            "--input",
            metavar="X.npz",
            help="Arrays by input name, as numpy.savez writes them.",
            show_default="synthetic",
        ),
    ] = None

    def load_with_feed(self, plan: Plan | None = None) -> tuple[Graph, Feed]:
        """Load the model; return its graph, and the given or synthetic inputs.

        Free dimensions that ``--shape`` leaves are those of the plan, or else of the given arrays.
        """
        graph = self.load(plan)
        if self.feed is None:
            return graph, synthetic_inputs(graph)
        if graph.free_dimensions:
            arrays = read_arrays(self.feed)
            shapes = {info.name: arrays[info.name].shape for info in graph.inputs if info.name in arrays}
            graph = load(self.path, {**shapes, **self._shapes()})
        return graph, read_feed(self.feed, graph)

    def run_plain(self, arrays: Feed) -> list[Any]:
        """Return the outputs of plain onnxruntime, which tells early whether the model runs on its inputs.

        Raises:
            ModelError: It does not.
        """
        if self.feed is not None:
            return run_plain(self.path, arrays, str(self.feed))
        return run_plain(self.path, arrays, hint="give inputs that it takes: --input X.npz")


@dataclass(frozen=True, slots=True)
class CostOptions:
    """The machine to plan for: this one, that of a stored profile, or one known from datasheets.

    Raises:
        OptionError: Options contradict each other, or this machine has fewer cores.
        ProviderError: This machine has no such accelerator.
        HardwareError: A part is unknown or damaged, or there is no processor.
        ProfileError: A stored profile is damaged.
    """

    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="P.json",
            help=f"A stored profile of this or another machine: a file, or {', '.join(stored_profiles())}.",
            show_default="measure this machine",
        ),
    ] = None
    hardware: HardwareOption = None
    corrections: Annotated[
        Path | None,
        typer.Option(
            metavar="P.json",
            help="A profile of some operators, measured on the machine of --hardware, to correct the estimates by.",
        ),
    ] = None
    cores: CoresOption = None
    accelerator: AcceleratorOption = None
    precision: PrecisionOption = None

    def __post_init__(self) -> None:
        check_precision(self.precision or "float32")
        for stored in filter(None, (self.profile, self.corrections)):
            Profile.load(stored)  # refuses a damaged one before outputs are looked at
        if self.hardware is not None:
            if self.precision == "bf16":
                raise OptionError("--precision bf16: not allowed with --hardware, since no datasheet states its gain")
            require_processor(find_hardware(self.hardware))
            if self.profile is not None or self.accelerator is not None:
                other = "--accelerator" if self.profile is None else "--profile"
                raise OptionError(f"{other}: not allowed with --hardware, which names the machine and its accelerator")
        elif self.corrections is not None:
            hint = "name a machine, --hardware l4+epyc-16"
            raise OptionError("--corrections: not allowed without --hardware", hint=hint)
        elif self.profile is not None and self.accelerator is not None:
            raise OptionError("--accelerator: not allowed with --profile, which holds an accelerator's costs or none")
        elif self.profile is None:
            _check_this_machine(self.cores, self.accelerator)

    def find_profile(
        self, graph: Graph, policies: Collection[str] = (), *, fresh: bool = False, plain: bool = True
    ) -> Profile:
        """Load the profile of a graph, estimate it, or measure it on this machine.

        Args:
            graph: The graph.
            policies: Schedulers that will use it; it has the costs of what they may merge, too.
            fresh: Ignore cached measurements.
            plain: Measure the plain session of the model, too.

        Raises:
            ProfileError: The stored profile is damaged.
            ShapeError: An input has a free dimension.
        """
        graph.require_shapes()
        if self.profile is not None:
            stored = self._stored_profile(self.profile)
            _warn_if_extrapolated(stored, graph)
            return stored
        chosen = map(find_policy, policies)
        variants = [v for policy in chosen if isinstance(policy, SolutionPolicy) for v in policy.variants(graph)]
        if self.hardware is not None:
            with step(f"estimating {graph.name}"):
                measured = Profile.load(self.corrections) if self.corrections else None
                machine = find_hardware(self.hardware)
                return estimate_profile(graph, machine, self.cores, variants=variants, corrections=measured)
        with step(f"profiling {graph.name}", animated=False) as update:
            accelerator = self.accelerator or "auto"
            measured = profile(
                graph,
                self.cores,
                accelerator,
                progress=update,
                fresh=fresh,
                variants=variants,
                plain=plain,
                precision=self.precision or "float32",
            )
        if measured.interference:
            note(f"warning: {OTHERS_USED_CORES}; costs may be unreliable and are not cached")
        return measured

    def _stored_profile(self, path: Path) -> Profile:
        loaded = Profile.load(path)
        if self.precision not in {None, loaded.precision}:
            hint = f"measure another one: chrion profile MODEL --precision {self.precision}"
            raise OptionError(f"--precision {self.precision}: {path} has costs in {loaded.precision}", hint=hint)
        return loaded


def _warn_if_extrapolated(stored: Profile, graph: Graph) -> None:
    """Print how much time is that of operators of which the profile has none that is comparable, and their types."""
    if not stored.machine.hardware and (found := stored.extrapolated(graph.dag)):
        costs = stored.costs(graph.dag)
        total_ms = sum(map(costs.mean_ms, range(len(graph.dag))))
        share = format_share(sum(map(costs.mean_ms, found)) / total_ms) if total_ms else "all"
        types = ", ".join(sorted({graph.dag.op_types[i] for i in found}))
        note(
            f"warning: {share} of the predicted time is extrapolated, since the profile has no comparable {types}; "
            "leave out --profile to measure this machine, or estimate another one from datasheets, as with "
            "--hardware gtx-1080-ti+xeon-12"
        )


def _check_this_machine(cores: int | None, accelerator: str | None) -> None:
    """Raise an error if this machine has fewer cores or another accelerator, before outputs are looked at."""
    check_cores(cores)
    if accelerator not in {None, "auto"}:
        usable_provider(accelerator)


def _policy_option(text: str, **settings: Any) -> Any:
    names = ", ".join(policy_names())
    return typer.Option(
        "--policy", metavar="NAME", autocompletion=complete_policy, help=f"{text}: {names}.", **settings
    )


@dataclass(frozen=True, slots=True)
class PlanningOptions:
    """How a model is planned, for one or several prices of memory."""

    gpu_budget: GpuBudgetOption = None
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="KIND",
            help="The memory that alpha prices in the default policy: resident, with each weight once, or paper "
            "(Equation 4), with the weights of each operator.",
            show_default="resident if the profile has measured accelerator memory, else paper",
        ),
    ] = None
    policy: Annotated[str, _policy_option("The scheduler")] = DEFAULT_POLICY
    streams: StreamsOption = None

    def plan_options(
        self, cores: int | None, slo: str | None = None, alpha: float | None = None, meter: StageMeter | None = None
    ) -> PlanOptions:
        """Return the options of a plan, with those that are not part of this group."""
        return PlanOptions(slo, alpha, self.policy, cores, self.streams, meter, self.gpu_budget, self.memory)


@dataclass(frozen=True, slots=True)
class ExecutionOptions:
    """What runs a model: a given plan, that of a scheduler, or what the session chooses.

    Raises:
        OptionError: Options contradict each other, or have no valid value.
    """

    plan: Annotated[
        Path | None, typer.Option(metavar="PLAN.json", help="Run this plan.", show_default="the session chooses")
    ] = None
    slo: SloOption = None
    alpha: AlphaOption = None
    gpu_budget: GpuBudgetOption = None
    policy: Annotated[
        str | None, _policy_option("Run the plan of this scheduler", show_default="the session chooses")
    ] = None
    cores: CoresOption = None
    accelerator: AcceleratorOption = None
    streams: StreamsOption = None
    precision: PrecisionOption = None
    max_error: MaxErrorOption = None

    def __post_init__(self) -> None:
        _ = self.plan_options  # checks them
        check_max_error(self.max_error, check_precision(self.precision or "float32"))
        _check_this_machine(self.cores, self.accelerator)
        others = (self.alpha, self.gpu_budget, self.policy, self.cores, self.accelerator, self.streams, self.precision)
        if self.plan is not None and others != (None,) * len(others):
            options = "--alpha, --gpu-budget, --policy, --cores, --accelerator, --streams or --precision"
            raise OptionError(f"--plan: not allowed with {options}", hint="the plan already decides these")

    @property
    def plan_options(self) -> PlanOptions:
        """The options of a plan."""
        policy = self.policy or DEFAULT_POLICY
        return PlanOptions(self.slo, self.alpha, policy, self.cores, self.streams, gpu_budget=self.gpu_budget)

    def load_plan(self) -> Plan | None:
        """Return the given plan, if any.

        Raises:
            PlanError: It is damaged.
        """
        return Plan.load(self.plan) if self.plan is not None else None

    def session_arguments(self, graph: Graph, plan: Plan | None) -> dict[str, Any]:
        """Return the arguments of HybridSession, beside the model.

        With a given plan, ``--policy`` or ``--streams`` the session runs that plan. Otherwise it chooses between plans
        and plain sessions, as it does for its users.
        """
        if plan is not None:
            return {"plan": plan, "strict": True}
        options = self.plan_options
        if self.policy is not None or self.streams is not None:
            costs = CostOptions(cores=self.cores, accelerator=self.accelerator, precision=self.precision)
            measured = costs.find_profile(graph, [options.policy], plain=False)
            with step(f"planning {graph.name}"):
                return {"plan": alternatives(graph, measured, options)[0], "strict": True}
        provider = usable_provider(self.accelerator or "auto")
        costs = CostOptions(cores=self.cores, accelerator=provider or "none", precision=self.precision)
        costs.find_profile(graph, plain=False)  # cached for the session
        return {
            "slo": self.slo,
            "alpha": self.alpha,
            "cores": self.cores,
            "gpu_budget": self.gpu_budget,
            "providers": [provider, CPU_PROVIDER] if provider else None,
            "tune": "now",
            "precision": self.precision or "float32",
            "max_error": self.max_error,
        }
