"""MultiSession: several models on the cores of one machine, whose blocks compete by deadlines or another policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

import onnx

from chrion.common.units import parse_duration_ms
from chrion.common.wrong_values import wrong_value
from chrion.errors import OptionError
from chrion.graph.model import TensorInfo
from chrion.machine.cores import check_cores, has_thread_niceness, physical_cores
from chrion.runtime.block_chain import open_chain
from chrion.serving.multi.block_lanes import BlockLanes, TaskFuture
from chrion.serving.multi.dispatcher import BlockSpan
from chrion.serving.multi.lane_models import Drop, LaneModels, by_name

Model = str | Path | bytes | onnx.ModelProto


class MultiSession(LaneModels):
    """Serves several ONNX models on the CPU cores of one machine.

    Each model is cut into blocks of a few milliseconds. Lanes, threads that are each pinned to a core, run the blocks
    of all tasks; after each block the policy decides again. Outputs are bit for bit those of a plain session with one
    thread.

    Methods may be called from any number of threads.

    Args:
        models: The models by name: files, their bytes, or ModelProtos.
        deadlines: The time that a task has from :meth:`submit` to its end, ``50ms`` for example (a number is in ms):
            one for all models, or by name.
        rates: Expected tasks per second, for all models or by name; with them ``static`` divides the cores.
        policy: A key of :data:`chrion.serving.multi.policies.POLICIES`; ``edf`` if there are deadlines, else
            ``fair``.
        priorities: The order of models for ``priority``, by name; 0, the default, is served first.
        queue: The most tasks that wait to begin, for each model or by name.
        drop: The task that a full queue drops: ``newest``, the one that is submitted, or ``oldest``; for all models or
            by name. With a queue of 1, ``oldest`` keeps the latest frame of a stream only.
        drop_late: Drop a task as soon as it cannot meet its deadline any more.
        background: Serve whole models side by side instead of blocks: those of later ``priorities``, or of later
            deadlines, on threads of a higher niceness. Linux only.
        accelerators: The execution provider of models that run on an accelerator, by name: ``cuda`` for example, or
            ``auto`` for the first one that works. They run whole, on two lanes of each accelerator.
        cores: The number of lanes; all physical cores that this process may use if None.
        block: The limit of a block's time; if None, 5 ms, or half of the shortest deadline but at least 2 ms.
        shapes: Shapes of inputs with free dimensions, by model.
        patience: Ageing: a task without a deadline, of a lower priority or beyond its deadline is served before those
            that are submitted this much later.

    Raises:
        ModelError: A model cannot be read, or onnxruntime refuses it.
        ProviderError: An accelerator does not work on this machine.
        OptionError: There is no model, or an option has an invalid value.
    """

    def __init__(  # noqa: PLR0913 - optional arguments are keyword-only
        self,
        models: Mapping[str, Model],
        *,
        deadlines: str | float | Mapping[str, str | float] | None = None,
        rates: float | Mapping[str, float] | None = None,
        policy: str | None = None,
        priorities: Mapping[str, int] | None = None,
        queue: int | Mapping[str, int] = 64,
        drop: Drop | Mapping[str, Drop] = "newest",
        drop_late: bool = False,
        background: bool = False,
        accelerators: Mapping[str, str] | None = None,
        cores: int | None = None,
        block: str | float | None = None,
        shapes: Mapping[str, Mapping[str, int | Sequence[int]]] | None = None,
        patience: str | float = "1s",
    ) -> None:
        check_cores(cores)
        if background and not has_thread_niceness():
            raise OptionError("background: threads of this system have no niceness of their own", hint="leave it out")
        super().__init__(
            models,
            cores or len(physical_cores()),
            deadlines=deadlines,
            rates=rates,
            policy=policy,
            priorities=priorities,
            queue=queue,
            drop=drop,
            drop_late=drop_late,
            background=background,
            accelerators=accelerators,
            block=block,
            patience=patience,
        )
        given = by_name(models, {} if shapes is None else shapes, "shapes", None)
        if any(not isinstance(own, Mapping | None) for own in given.values()):
            raise wrong_value("shapes", "shapes by input for each model", shapes)
        if fixed := [name for name in self._providers if given[name]]:
            raise OptionError(f"shapes: model {fixed[0]!r} runs whole on an accelerator, with any shapes")
        chains = {
            name: open_chain(
                model, self._limit_ms, given[name], self._providers.get(name, ""), modules=self._in_modules
            )
            for name, model in models.items()
        }
        self._use(chains)
        layout = self._layout
        self._core = BlockLanes(
            chains, self._rules, layout.lanes, self._new_dispatcher, cores=layout.pinned, niceness=layout.niceness
        )

    def submit(self, name: str, feed: Mapping[str, Any], deadline: str | float | None = None) -> TaskFuture:
        """Submit a task.

        Args:
            name: The model.
            feed: Its inputs by name, arrays or OrtValues, which are copied.
            deadline: The time that the task has, if it is not the model's.

        Returns:
            A future of the outputs by name. It raises DroppedError if the task is dropped, and an exception of
            onnxruntime if a block fails. It can be cancelled until the task is over, after the block that runs then.
            Its callbacks run on a lane, so that they should be short.

        Raises:
            OptionError: There is no such model, or the deadline is none.
            RuntimeError: The session is closed, or its process was forked.
            Exception: As InferenceSession raises for wrong inputs.
        """
        deadline_ms = None if deadline is None else parse_duration_ms(deadline, "deadline")
        return self._core.submit(name, self._core.chain(name).check(feed), deadline_ms)

    @property
    def inputs(self) -> dict[str, tuple[TensorInfo, ...]]:
        """The inputs of each model."""
        return {name: chain.inputs for name, chain in self._core.chains.items()}

    def counts(self) -> dict[str, dict[str, int]]:
        """Return the number of each model's tasks so far, by outcome, and those that are ``waiting`` to begin."""
        return self._core.counts()

    def record(self) -> AbstractContextManager[list[BlockSpan]]:
        """Record the blocks that end within this context."""
        return self._core.record()

    def explain(self) -> str:
        """Return the policy, the blocks of each model, and the plan of the policy ``top``."""
        return "\n".join([super().explain(), *self._core.plan_lines()])

    def close(self) -> None:
        """Refuse further tasks, and stop the lanes when those that were submitted are over. Idempotent.

        It waits until then, unless a callback of a future calls it.
        """
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
