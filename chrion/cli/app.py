"""The ``chrion`` command and its subcommands; errors become one line on stderr and an exit code."""

from __future__ import annotations

import functools
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from rich.markup import escape

from chrion.cli.bench import bench
from chrion.cli.cache import app as cache_app
from chrion.cli.commands import USAGE_ERROR, Command, Group, options_of
from chrion.cli.compare import compare
from chrion.cli.console import stderr
from chrion.cli.demo import demo
from chrion.cli.devices import devices
from chrion.cli.exit_codes import BAD_INPUT, INTERRUPTED, exit_code
from chrion.cli.finetune import finetune
from chrion.cli.generate import generate
from chrion.cli.hardware import hardware
from chrion.cli.model import model
from chrion.cli.multi import multi
from chrion.cli.option_groups import expand_groups
from chrion.cli.partition import partition
from chrion.cli.plan import app as plan_app
from chrion.cli.profile import profile
from chrion.cli.replay import replay
from chrion.cli.report import report
from chrion.cli.run import run as run_command
from chrion.cli.serve import serve
from chrion.cli.simulate import simulate
from chrion.cli.sweep import sweep
from chrion.cli.tune import tune
from chrion.common.suggestions import did_you_mean
from chrion.common.version import __version__
from chrion.common.wrong_values import wrong_value
from chrion.errors import ChrionError
from chrion.scheduler import POLICIES, policy_names

#: Commands of a group that an error lists at most.
_FEW = 6
_SETTINGS = {"help_option_names": ["-h", "--help"]}
_START, _STUDY, _PLAN, _RUN, _FILES = "Start", "Study", "Plan", "Run", "Files"

#: The values that an option may have, by the type of Pydantic's error.
_EXPECTED = {
    "int_parsing": "a whole number",
    "float_parsing": "a number",
    "bool_parsing": "true or false",
    "greater_than_equal": "{ge:g} or more",
    "less_than_equal": "{le:g} or less",
}

app = typer.Typer(
    name="chrion",
    cls=Group,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=_SETTINGS,
    epilog="Exit codes: 0 done, 1 failed, 2 bad input, 3 the SLO or the GPU budget is missed, 130 interrupted.",
)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the given words, or of ``sys.argv``; return its exit code."""
    try:
        code = app(arguments, standalone_mode=False, prog_name="chrion")
    except ChrionError as error:
        return _fail(str(error), exit_code(error))
    except USAGE_ERROR as error:
        context: Any = getattr(error, "ctx", None)
        command = context.command_path if context else "chrion"
        return _fail(f"{_describe_usage(error, context)} (see: {command} --help)")
    except typer.Abort:
        raise KeyboardInterrupt from None
    if code == INTERRUPTED:  # what Typer makes of Ctrl-C
        raise KeyboardInterrupt
    return code if isinstance(code, int) else 0


def _fail(message: str, code: int = BAD_INPUT) -> int:
    print(f"chrion: error: {' '.join(message.split())}", file=sys.stderr)  # noqa: T201 - one line, as long as it is
    return code


def _describe_usage(error: Any, context: Any) -> str:
    """Return the message of an error of Typer in the form of Chrion's own."""
    if type(error).__name__ == "NoSuchOption":
        given, known = error.option_name, options_of(context.command)
        set_key = "values of the scenario are changed by --set KEY=VALUE, for example --set rate_per_s=8"
        hint = did_you_mean(given, known, set_key if "--set" in known else "-")
        return f"no such option {given}" + ("" if hint == "-" else f"; {hint}")
    problems: list[dict[str, Any]] = getattr(
        error.__cause__, "errors", list
    )()  # those of Pydantic, which Typer converts values with
    if problems and error.param:
        problem = problems[0]
        expected = _EXPECTED.get(problem["type"], "{msg}").format(msg=problem["msg"], **problem.get("ctx", {}))
        return wrong_value(max(error.param.opts, key=len), expected, problem["input"]).message
    message = str(error.format_message()).rstrip(".")
    names = [*getattr(context.command, "commands", [])] if context and message.startswith("No such command") else []
    return f"{message}; expected {', '.join(names)}" if 0 < len(names) <= _FEW else message


class _LogHandler(logging.Handler):
    """Prints the records of Chrion's loggers on stderr, above a progress bar if one is shown."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        level = "" if record.levelno == logging.INFO else f"{record.levelname.lower()}: "
        stderr.print(f"chrion: {level}{record.getMessage()}", markup=False, highlight=False)


def _set_verbosity(count: int) -> int:
    """Show warnings of Chrion's own loggers; with one ``-v`` steps and decisions too, with two everything."""
    logger = logging.getLogger("chrion")
    previous = [handler for handler in logger.handlers if isinstance(handler, _LogHandler)]
    if not previous:
        logger.addHandler(_LogHandler())
    if count or not previous:
        logger.setLevel({0: logging.WARNING, 1: logging.INFO}.get(count, logging.DEBUG))
    return count


def _print_version(value: bool) -> None:
    if value:
        print(f"chrion {__version__}")  # noqa: T201 - this is what stdout is for
        raise typer.Exit


VerboseOption = Annotated[
    int,
    typer.Option(
        "--verbose",
        "-v",
        count=True,
        callback=_set_verbosity,
        help="Log steps and decisions; -vv logs details.",
        show_default=False,
    ),
]


@app.callback(invoke_without_command=True)
def _options(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    verbose: VerboseOption = 0,  # noqa: ARG001 - its callback does the work
) -> None:
    """Run one ONNX model on an accelerator and the CPU cores at once."""
    if context.invoked_subcommand is None:
        print(context.get_help())  # noqa: T201 - this is what stdout is for


def _register(command: Callable[..., None], panel: str, *examples: str) -> None:
    """Add a command with ``--verbose`` and with examples at the end of its help."""
    expanded = expand_groups(command)

    @functools.wraps(expanded)
    def with_verbosity(*, verbose: int, **options: Any) -> None:  # noqa: ARG001 - its callback does the work
        expanded(**options)

    signature = inspect.signature(expanded)
    option = inspect.Parameter("verbose", inspect.Parameter.KEYWORD_ONLY, default=0, annotation=VerboseOption)
    with_verbosity.__signature__ = signature.replace(  # type: ignore[attr-defined] # Typer reads it
        parameters=[*signature.parameters.values(), option]
    )
    app.command(
        command.__name__,
        cls=Command,
        rich_help_panel=panel,
        help=escape("\n\n".join(" ".join(part.split()) for part in (command.__doc__ or "").split("\n\n"))),
        epilog=_policy_lines(signature) + "\n".join(["[bold]Examples[/bold]", *(f"  chrion {e}" for e in examples)]),
    )(with_verbosity)


def _policy_lines(signature: inspect.Signature) -> str:
    """Return a heading and a line for each scheduler, for the help of a command with an option for them.

    Policies of installed packages are not imported for that, so they have no description.
    """
    if not {"policy", "policies"} & set(signature.parameters):
        return ""
    built_in = {name: policy.description for name, policy in POLICIES.items()}
    lines = (f"  {name}: {escape(built_in.get(name, 'Of an installed package.'))}" for name in policy_names())
    return "\n".join(["[bold]Schedulers[/bold]", *lines]) + "\n\n"


_register(demo, _START, "demo", "demo -o lanes.html")
_register(devices, _START, "devices", "devices --json")
_register(hardware, _START, "hardware", "hardware l4+epyc-16", "hardware ./mine.toml --json")
_register(model, _START, "model --list", "model lstm -o lstm.onnx --layers 12 --batch 8", "model squeezenet")
_register(
    profile,
    _PLAN,
    "profile lstm.onnx",
    "profile lstm.onnx --cores 2 -o two-cores.profile.json",
    "profile lstm.onnx --profile gtx1080ti-paper --plot profile.png",
)
_register(
    partition,
    _PLAN,
    "partition lstm.onnx",
    "partition lstm.onnx --profile gtx1080ti-paper --slo 60ms --alpha 0.3",
    "partition lstm.onnx --gpu-budget 600MB --profile server.profile.json",
    "partition lstm.onnx --hardware l4+epyc-16 --cores 4",
)
_register(sweep, _PLAN, "sweep lstm.onnx --alpha 0:1:0.1 --png curve.png", "sweep lstm.onnx --alpha 0,0.2,0.5 --json")
app.add_typer(plan_app, name="plan", rich_help_panel=_PLAN)
_register(
    run_command,
    _RUN,
    "run lstm.onnx",
    "run lstm.onnx --input inputs.npz --repeat 100",
    "run lstm.onnx --plan lstm.plan.json",
)
_register(
    generate,
    _RUN,
    "generate decoder.onnx --prompt 'Once upon a time'",
    "generate decoder.onnx --tokens 1,2,3 --temperature 0.8 --top-p 0.9 --seed 7",
)
_register(tune, _RUN, "tune lstm.onnx", "tune encoder.onnx --shape batch=1 --shape batch=8 --beside")
_register(
    finetune,
    _RUN,
    "finetune pipeline.onnx --data new.parquet --target y -o better.onnx",
    "finetune old.onnx --data july.csv --validation august.csv -o new.onnx",
)
_register(bench, _RUN, "bench lstm.onnx", "bench lstm.onnx --plan lstm.plan.json --json")
_register(
    multi,
    _RUN,
    "multi camera.onnx lidar.onnx --rates 30,10 --deadline 50ms,100ms",
    "multi a.onnx b.onnx c.onnx --rates 1,2,4 --deadline 50ms --find",
    "multi camera.onnx lidar.onnx --rates 30,10 --hardware epyc-16 --cores 4",
)
_register(report, _RUN, "report lstm.plan.json --html lanes.html", "report lstm.plan.json --measured --model lstm.onnx")
_register(compare, _STUDY, "compare lstm.onnx", "compare lstm.onnx --policies chrion,heft,ios --plot policies.png")
_register(
    simulate, _STUDY, "simulate --list", "simulate table7", "simulate table7 --sweep gpu_memory_gb=11,14 --plot s.png"
)
_register(
    serve,
    _RUN,
    "serve served",
    "serve served --host-budget 4GB --serving-policy cost,deadline",
    "serve served --gpu-budget 12GB --model-control poll",
)
_register(
    replay, _STUDY, "replay table7 --write-models models", "replay table7 --url http://127.0.0.1:8000 --duration 60s"
)
app.add_typer(cache_app, name="cache", rich_help_panel=_FILES)
