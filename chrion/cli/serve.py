"""``chrion serve``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn
from urllib.parse import urlsplit

import typer
from msgspec import structs

from chrion.cli.console import note
from chrion.cli.options import GpuBudgetOption
from chrion.common.installation import install_hint, require_extras
from chrion.common.units import parse_duration_ms, parse_size_mb
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.serving.manager.policy_settings import DEFAULT_POLICIES, PolicySpec

if TYPE_CHECKING:
    from chrion.serving.server.options import ClusterOptions, DeviceOptions, ServerOptions  # needs the extra

_POLL = "15s"
#: Modules by the extra that has them.
_LIBRARIES = {
    "serve": ("starlette", "uvicorn", "grpc", "h11", "prometheus_client"),
    "ray": ("ray",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}


def serve(
    repository: Annotated[
        Path, typer.Argument(metavar="REPOSITORY", help="A folder with NAME/VERSION/model.onnx.", show_default=False)
    ],
    http: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of REST, metrics and the page.")] = (
        "127.0.0.1:8000"
    ),
    grpc: Annotated[str, typer.Option(metavar="HOST:PORT", help="Address of gRPC, or none.")] = "127.0.0.1:8001",
    gpu_budget: GpuBudgetOption = None,
    host_budget: Annotated[
        str | None,
        typer.Option(
            metavar="4GB",
            help="Host memory for models; a plain number is in MB.",
            show_default="half of the free memory",
        ),
    ] = None,
    serving_policy: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Eviction lru, lfu or cost; order of loads fifo or demand; admission none or deadline.",
        ),
    ] = "",
    scenario: Annotated[
        str | None, typer.Option(metavar="NAME", help="Use the policies and the GPU memory of a simulated scenario.")
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="cuda, webgpu, none, or an execution provider by its full name.",
            show_default="with a GPU budget or a scenario the first that works, else none",
        ),
    ] = None,
    model_control: Annotated[
        str,
        typer.Option(
            metavar="MODE",
            help="Models served: those at the start (none), in the folder (poll), or as clients load (explicit).",
        ),
    ] = "none",
    load_model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="With explicit: a model to serve, or *. Repeatable.")
    ] = None,
    poll: Annotated[
        str | None,
        typer.Option(
            metavar="15s", help="With poll: the polling interval; a plain number is in ms.", show_default=_POLL
        ),
    ] = None,
    max_request: Annotated[
        str, typer.Option(metavar="256MB", help="Maximum request size; a plain number is in MB.")
    ] = "256MB",
    request_budget: Annotated[
        str, typer.Option(metavar="1GB", help="Memory for requests in flight; a plain number is in MB.")
    ] = "1GB",
    max_waiting: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Maximum queued requests; default: 1024, or the scenario's.")
    ] = None,
    max_connections: Annotated[int, typer.Option(min=1, metavar="N", help="Maximum connections per protocol.")] = 1024,
    max_client_connections: Annotated[
        int, typer.Option(min=1, metavar="N", help="Maximum HTTP connections per client address, such as a proxy's.")
    ] = 512,
    max_run: Annotated[
        str,
        typer.Option(
            metavar="300s", help="Maximum time of a run; model.toml may set another. A plain number is in ms."
        ),
    ] = "300s",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Serve from replicas on a Ray cluster: an address, auto, or local."),
    ] = None,
    replicas: Annotated[
        str, typer.Option(metavar="N", help="Replicas with --ray: a number, MIN..MAX by load, or nodes.")
    ] = "nodes",
    drain: Annotated[
        str, typer.Option(metavar="30s", help="Time for requests in flight at the end; a plain number is in ms.")
    ] = "30s",
    token_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Require the bearer token in a file.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(metavar="PEM", help="Certificate chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="Key of the certificate.")] = None,
    otlp: Annotated[
        str, typer.Option(metavar="URL", help="Send traces to an OpenTelemetry collector, http://HOST:4318.")
    ] = "",
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Let pages of an origin read answers; * for any. Repeatable."),
    ] = None,
    restart: Annotated[bool, typer.Option("--restart", help="Start the server again if its process crashes.")] = False,
) -> None:
    """Serve the models of a repository over the Open Inference Protocol, within a memory budget."""
    require_libraries("serve", ray=ray is not None, otel=bool(otlp))
    from chrion.serving.server import options  # noqa: PLC0415 - needs the extra

    base, scenario_bytes = scenario_policies(scenario) if scenario else (DEFAULT_POLICIES, 0)
    tls = _tls_files(tls_certificate, tls_key)
    if replicas != "nodes" and not ray:
        raise OptionError("--replicas: only with --ray")
    if poll and model_control != "poll":
        raise OptionError("--poll: only with --model-control poll")
    devices = options.DeviceOptions(
        accelerator or ("auto" if gpu_budget or scenario else "none"),
        _parse_bytes(gpu_budget, "--gpu-budget") / 1e6 if gpu_budget else scenario_bytes / 1e6,
        _parse_bytes(host_budget, "--host-budget") / 1e6 if host_budget else None,
        needs_gpu=gpu_budget is not None,
    )
    policies = options.parse_policies(serving_policy, base, routing=bool(ray))
    checked = options.ServerOptions(
        repository=repository.absolute(),  # else reasons would show folders; links stay, since polling follows them
        http=options.parse_address(http, "--http"),
        grpc=None if grpc == "none" else options.parse_address(grpc, "--grpc"),
        policies=structs.replace(policies, max_waiting=max_waiting or policies.max_waiting),
        control=model_control,
        load=tuple(load_model or ()),
        poll_s=parse_duration_ms(poll or _POLL, "--poll") / 1000,
        body_bytes=_parse_bytes(max_request, "--max-request"),
        request_bytes=_parse_bytes(request_budget, "--request-budget"),
        max_connections=max_connections,
        max_client_connections=max_client_connections,
        max_run_s=parse_duration_ms(max_run, "--max-run") / 1000,
        drain_s=parse_duration_ms(drain, "--drain") / 1000,
        token=read_token(token_file) if token_file else "",
        tls=tls,
        otlp=_collector(otlp),
        cors=tuple(options.parse_origin(origin) for origin in cors or ()),
    )
    cluster = options.ClusterOptions(ray, devices, options.parse_replicas(replicas)) if ray else None
    if restart:
        _supervise(checked)
    _run(checked, devices, cluster)


def scenario_policies(name: str) -> tuple[PolicySpec, int]:
    """Return the policies of a scenario, and the accelerator memory of its first server in bytes.

    Raises:
        ScenarioError: The scenario is invalid.
        OptionError: A policy is one of the simulator alone.
    """
    from chrion.serving.simulator.scenario import find_scenario  # noqa: PLC0415 - imported on use

    scenario = find_scenario(name).build()
    if scenario.policies.eviction == "belady":
        raise OptionError(f"--scenario {name}: eviction 'belady' needs the future requests: a server cannot use it")
    if scenario.policies.by_speed:
        raise OptionError(f"--scenario {name}: policies.by_speed: the speeds of a server's replicas are not known")
    return scenario.policies, scenario.servers[0].budget_bytes


def require_libraries(command: str, *, ray: bool = False, otel: bool = False) -> None:
    """Refuse a command if libraries of the extras that it needs are missing.

    Raises:
        OptionError: Some are missing.
    """
    needed = {"serve": True, "ray": ray, "otel": otel}
    require_extras(command, {extra: modules for extra, modules in _LIBRARIES.items() if needed[extra]})


def _parse_bytes(text: str, option: str) -> int:
    """Return a size in bytes, of which the server needs at least one.

    Raises:
        OptionError: It is none, or zero.
    """
    return max(1, round(parse_size_mb(text, option, zero=False) * 1e6))


def _run(checked: ServerOptions, devices: DeviceOptions, cluster: ClusterOptions | None) -> None:
    """Serve from this process, or from replicas on a cluster.

    Raises:
        OptionError: Ray Serve is not installed.
    """
    from chrion.serving.server import logs  # noqa: PLC0415 - needs the extra

    if not cluster:
        from chrion.serving.server import run  # noqa: PLC0415 - needs the extra

        checked = devices.applied_to(checked)
        logs.set_up_logs()
        run.run(checked, note)
        return
    try:
        from ray import serve  # noqa: F401, PLC0415 - needs the extra
    except ImportError as error:
        raise OptionError(f"--ray: {error.name} is not installed", hint=install_hint("ray", "serve")) from error
    from chrion.serving.server import ray_serve  # noqa: PLC0415 - needs the extra

    logs.set_up_logs()
    ray_serve.run(checked, cluster, note)


def _supervise(options: ServerOptions) -> NoReturn:
    from chrion.serving.server import logs, supervisor  # noqa: PLC0415 - needs the extra

    logs.set_up_logs()
    if 0 in (options.http[1], options.grpc[1] if options.grpc else None):
        raise OptionError("--restart: expected ports other than 0, so that they stay the same")
    raise SystemExit(supervisor.Supervisor(supervisor.server_command(sys.argv[1:], "--restart")).run())


def _tls_files(certificate: Path | None, key: Path | None) -> tuple[Path, Path] | None:
    if certificate and key:
        return certificate, key
    if certificate or key:
        raise OptionError("--tls-certificate and --tls-key: expected both or none")
    return None


def _collector(url: str) -> str:
    if url and not (url.startswith(("http://", "https://")) and urlsplit(url).hostname):
        raise wrong_value("--otlp", "http://HOST:PORT", url, hint="for example http://127.0.0.1:4318")
    return url


def read_token(path: Path) -> str:
    """Return the token in a file.

    Raises:
        OptionError: The file cannot be read, or has no token.
    """
    try:
        token = path.read_text(encoding="ascii").strip()
    except FileNotFoundError as error:
        raise OptionError(f"--token-file {path}: no such file") from error
    except OSError as error:
        raise OptionError(f"--token-file {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise OptionError(f"--token-file {path}: expected ASCII text") from error
    if not token or not token.isprintable():
        raise OptionError(f"--token-file {path}: expected one line with the token")
    return token
