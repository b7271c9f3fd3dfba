"""Serving from a Ray cluster: the deployment of the replicas, and the process that clients connect to."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ray
from msgspec import structs
from ray import serve
from ray.exceptions import RayError
from ray.serve import RunTarget
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus

from chrion.errors import OptionError
from chrion.serving.manager.scaling import AutoscalingSpec
from chrion.serving.ray_cluster import connected
from chrion.serving.server import documents, ray_router, ray_scaling, shared_view
from chrion.serving.server.failures import RequestFailure
from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.generators import list_generators
from chrion.serving.server.grace import Grace
from chrion.serving.server.options import ClusterOptions, ServerOptions
from chrion.serving.server.ray_replica import NO_TEXT, ModelReplica
from chrion.serving.server.ray_target import ClusterTarget
from chrion.serving.server.run import answer_until_stopped
from chrion.serving.server.served_models import ServedModels, describe_versions

log = logging.getLogger("chrion.server")

#: The name of the application on the cluster.
APPLICATION = "chrion"
#: Interval of the reports of replicas, in seconds, besides those with every answer (a choice, not measured).
_REPORT_S = 1.0
#: Maximum replicas, if their number follows that of nodes or GPUs: a bound that no cluster should reach.
_MAX_REPLICAS = 1000
#: Time over which Serve averages the number of requests: it must be longer than the interval at which Serve reads it.
_AVERAGED = {"look_back_period_s": 11.0}
#: Interval at which the state of replicas that start is asked for, in seconds (a choice, not measured).
_STARTING_S = 0.2


class _StoppedError(Exception):
    """SIGTERM or SIGINT came before the replicas were ready."""


def run(options: ServerOptions, cluster: ClusterOptions, announce: Callable[[str], None]) -> None:
    """Serve from replicas on a Ray cluster until SIGTERM or SIGINT, then remove them gracefully.

    Args:
        options: The options, without budgets and accelerator, which the replicas decide about.
        cluster: What decides about the replicas.
        announce: Called with the addresses once requests can be served.

    Raises:
        OptionError: The cluster is not reachable, the replicas do not start, or an address cannot be bound.
    """
    if options.control == "explicit":
        raise OptionError("--model-control explicit: not with --ray", hint="use none or poll")
    with connected(cluster.address, "chrion serve --ray"):
        asyncio.run(_serve(options, cluster, announce))


async def _serve(options: ServerOptions, cluster: ClusterOptions, announce: Callable[[str], None]) -> None:
    view = shared_view.views[APPLICATION] = shared_view.SharedView(options.policies)
    target = ClusterTarget(view, options)
    without_text = GenerationService({}, options.policies.max_waiting, refused=NO_TEXT)
    if names := await asyncio.to_thread(list_generators, options.repository):
        log.warning(NO_TEXT, extra={"fields": {"models": names}})

    async def connect(handle: Any) -> str:
        try:
            await _wait_until_running(cluster.address)
            await target.connect(handle)
            index = await target.index("")
        except (RequestFailure, RayError, RayServeException) as error:
            raise OptionError(f"--ray {cluster.address}: the replicas do not answer: {error}") from error
        bad = {(entry["name"], entry["version"]) for entry in index if entry["state"] == documents.UNAVAILABLE}
        return describe_versions({(entry["name"], entry["version"]) for entry in index} - bad, bad)

    async def begin() -> str:
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        # It cannot be interrupted: replicas that a thread deploys after their removal would stay.
        handle = await asyncio.to_thread(_deploy, options, cluster)
        connecting, stopping = asyncio.create_task(connect(handle)), asyncio.create_task(stop.wait())
        await asyncio.wait((connecting, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        if stop.is_set():
            connecting.cancel()
            await asyncio.wait((connecting,))
            raise _StoppedError
        return connecting.result()

    async def end(grace: Grace) -> None:
        await target.close(grace)
        try:
            await asyncio.to_thread(serve.delete, APPLICATION)
        except (RayError, RayServeException, TimeoutError) as error:
            log.warning("the replicas cannot be removed", extra={"fields": {"reason": str(error)}})
        # Serve reports metrics in a thread of its own, which fails with a traceback when the connection is closed.
        logging.getLogger("ray.serve").setLevel(logging.CRITICAL + 1)

    try:
        await answer_until_stopped(options, ServedModels(target, without_text, begin, end), announce)
    except _StoppedError:
        log.info("stopped")


async def _wait_until_running(address: str) -> None:
    """Wait until the replicas run.

    Raises:
        OptionError: They do not start.
    """
    while True:
        state = (await asyncio.to_thread(serve.status)).applications.get(APPLICATION)
        if state and state.status == ApplicationStatus.RUNNING:
            return
        if state and state.status == ApplicationStatus.DEPLOY_FAILED:
            raise OptionError(f"--ray {address}: the replicas do not start: {state.message}")
        await asyncio.sleep(_STARTING_S)


def _deploy(options: ServerOptions, cluster: ClusterOptions) -> Any:
    """Deploy the replicas, which start then, and return Serve's handle of them.

    Raises:
        OptionError: Serve refuses to deploy them.
    """
    gpus = cluster.devices.accelerator != "none" and ray.cluster_resources().get("GPU", 0) > 0
    minimum, maximum = cluster.replicas
    places = ray_scaling.count_places(ray.nodes(), gpus=gpus)
    if places < max(1, minimum):
        kind = "GPUs" if gpus else "nodes"
        log.warning(
            "too few nodes or GPUs: waiting for more", extra={"fields": {"replicas": max(1, minimum), kind: places}}
        )
    name, rules = "one_per_gpu" if gpus else "one_per_node", {}
    if maximum:
        name, rules = "ByLoad", {"maximum": maximum, **structs.asdict(AutoscalingSpec(min_servers=minimum))}
    scaling = AutoscalingConfig(
        min_replicas=minimum or 1,
        max_replicas=maximum or _MAX_REPLICAS,
        initial_replicas=minimum or max(1, places),
        policy=AutoscalingPolicy(policy_function=f"{ray_scaling.__name__}:{name}", policy_kwargs=rules),
        upscale_delay_s=0,
        downscale_delay_s=0,
        **_AVERAGED,
    )
    router = RequestRouterConfig(
        request_router_class=f"{ray_router.__name__}:ModelRouter",
        request_router_kwargs={"application": APPLICATION},
        request_routing_stats_period_s=_REPORT_S,
    )
    deployment = serve.deployment(
        name="replica",
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": 1, "num_gpus": int(gpus)},
        max_replicas_per_node=None if gpus else 1,
        # The manager of a replica refuses requests, not Serve.
        max_ongoing_requests=2 * options.policies.max_waiting,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=options.drain_s,
        request_router_config=router,
        logging_config={"enable_access_log": False, "log_level": "WARNING"},
    )(ModelReplica)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # losses are logged by the target
    application = deployment.bind(replace(options, token="", tls=None), cluster.devices)
    try:
        serve.start(proxy_location="Disabled")
        run_target = RunTarget(application, name=APPLICATION, route_prefix=None)
        return serve.run_many([run_target], wait_for_applications_running=False)[0]
    except (RuntimeError, RayServeException) as error:
        raise OptionError(f"--ray {cluster.address}: the replicas do not start: {error}") from error
