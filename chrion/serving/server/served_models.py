"""The models of a server, with what makes them ready and ends them; without sockets and signals."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from chrion.common.units import format_count
from chrion.machine.cores import physical_cores
from chrion.serving.manager import LiveManager
from chrion.serving.manager.records import HOST
from chrion.serving.server.catalogue import Catalogue
from chrion.serving.server.core import ServingCore
from chrion.serving.server.generation_service import GenerationService
from chrion.serving.server.generators import open_generators
from chrion.serving.server.grace import Grace
from chrion.serving.server.options import ServerOptions
from chrion.serving.server.repository import EXPECTED_FILES, Key
from chrion.serving.server.statistics import ModelStatistics
from chrion.serving.server.target import LocalTarget, Target

#: Versions that the line at the start names; the log has all of them.
_NAMED = 3


@dataclass(frozen=True, slots=True)
class ServedModels:
    """The models that the services of a server answer for."""

    target: Target
    #: The models that generate text.
    generation: GenerationService
    #: Makes the models ready, and returns what is served, in words.
    begin: Callable[[], Awaitable[str]]
    #: Refuses new requests, and ends those in flight within their grace; called also if ``begin`` fails.
    end: Callable[[Grace], Awaitable[None]]


def describe_versions(
    served: Collection[Key], unserved: Collection[Key], waiting: int = 0, silent: Collection[str] = ()
) -> str:
    """Return how many models are served, and what is not served, in words.

    Args:
        served: The versions that are served.
        unserved: The versions that cannot be served.
        waiting: The number of models that are served when a client loads them.
        silent: The models that were to generate text and cannot.
    """
    models = len({name for name, _ in served})
    parts = [format_count(models, "model")]
    if len(served) != models:
        parts[0] += f" in {len(served)} versions"
    if waiting:
        parts.append(f"{waiting} more on request, see --load-model")
    if unserved:
        names = [f"{name} version {version}" if version else name for name, version in sorted(unserved)]
        parts.append(f"not served, see the log: {_some(names)}")
    elif not served and not waiting:
        parts.append(f"the repository has none: expected {EXPECTED_FILES}")
    if silent:
        parts.append(f"without text, see the log: {_some(sorted(silent))}")
    return parts[0] + (f" ({'; '.join(parts[1:])})" if parts[1:] else "")


def _some(names: Sequence[str]) -> str:
    """Return the first of some names, and how many there are beyond them."""
    more = [f"{len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])


def serving_core(options: ServerOptions, budgets: Mapping[str, int], cores: Sequence[int]) -> ServingCore:
    """Return a core without models.

    Args:
        options: The options of the server.
        budgets: Memory for models by device, in bytes.
        cores: The CPU cores that requests may use.
    """
    slots = 1 if options.provider else 0
    return ServingCore(
        LiveManager(budgets, cores, slots=slots, policies=options.policies),
        cores,
        slots=slots,
        provider=options.provider,
        request_bytes=options.request_bytes,
        max_run_ms=options.max_run_s * 1000,
    )


def local_models(options: ServerOptions) -> ServedModels:
    """Return the models of a repository, served from this process; its generators are open.

    Raises:
        OptionError: The repository cannot be read.
    """
    cores = physical_cores()
    chosen = options.load if options.control == "explicit" and "*" not in options.load else None
    generators, failed = open_generators(options.repository, options.budgets.get(HOST, 0), chosen)
    taken = sum(served.reserved_bytes for served in generators.values())
    budgets = {**options.budgets, HOST: options.budgets.get(HOST, 0) - taken}
    core = serving_core(options, budgets, cores)
    accelerator = options.provider is not None
    generated = {(served.name, served.version) for served in generators.values()}
    catalogue = Catalogue(options.repository, core, options.control, accelerator=accelerator, generated=generated)

    def statistics(key: Key) -> ModelStatistics | None:
        return core.models[key].statistics if key in core.models else None

    generation = GenerationService(generators, options.policies.max_waiting, failed, statistics=statistics)
    pollers: list[asyncio.Task[None]] = []

    async def begin() -> str:
        core.start()
        await catalogue.start(options.load)
        if options.control == "poll":
            pollers.append(asyncio.create_task(catalogue.poll_forever(options.poll_s)))
        return describe_versions(catalogue.served, catalogue.unserved, len(catalogue.waiting), failed)

    async def end(grace: Grace) -> None:
        for poller in pollers:
            poller.cancel()
        await asyncio.gather(core.close(grace), generation.close(grace))

    return ServedModels(LocalTarget(core, catalogue, generation), generation, begin, end)
