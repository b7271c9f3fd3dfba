"""Fallbacks of a session: from the accelerator to the CPU, and from a plan to a plain session."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import onnxruntime as ort

from chrion.graph.loader import first_line
from chrion.graph.model import Graph
from chrion.runtime.execution.engine import CutEngine, Engine, PlainEngine
from chrion.runtime.execution.executor import AcceleratorFailure
from chrion.runtime.options.session_options import run_reason
from chrion.runtime.selection.configuration import SessionConfig
from chrion.runtime.selection.selector import EngineSelector

log = logging.getLogger(__name__)

Shapes = tuple[tuple[int, ...], ...]
T = TypeVar("T")


class Fallbacks:
    """The part of :class:`chrion.HybridSession` that serves requests whatever fails."""

    _config: SessionConfig
    _selector: EngineSelector
    _lock: AbstractContextManager[Any]
    _graph: Graph | None
    _engine: Engine
    _engines: OrderedDict[Shapes, Engine]
    _plain: PlainEngine | None
    _strict: bool
    _refusal: str
    _first_engine: Callable[[], Engine]
    _engine_for: Callable[[Mapping[str, Any]], Engine]
    _plain_engine: Callable[[str], PlainEngine]

    def _served(self, feed: Mapping[str, Any], serve: Callable[[Engine], T], run_options: ort.RunOptions | None) -> T:
        """Serve a request; again and without the accelerator if that fails, unless the caller wants to be told."""
        engine = self._engine_for(feed)
        if isinstance(engine, CutEngine) and (reason := run_reason(run_options, accelerated=engine.accelerated)):
            engine = self._plain_engine(reason)
        try:
            return serve(engine)
        except AcceleratorFailure as failure:
            if self._config.strict:
                raise failure.reason from failure.__cause__
            error = failure.reason
        except Exception as failure:
            if isinstance(engine, CutEngine):
                if self._strict or self._refusal or not _of_segments(failure, run_options):
                    raise
                return self._served_plain(engine, serve, failure)
            if self._config.strict or not engine.accelerated:
                raise
            error = failure
        return self._served_on_cpu(feed, serve, error)

    def _served_plain(self, engine: CutEngine, serve: Callable[[Engine], T], error: Exception) -> T:
        """Serve a request in one piece after a segment failed; if that works, so are all later ones of its shapes.

        Raises:
            Exception: What InferenceSession raises for the request.
        """
        plain = self._plain_engine(f"a segment failed: {first_line(error)}")
        result = serve(plain)
        log.warning("the model runs plain from now on: %s", plain.reason)
        with self._lock:
            for shapes in [shapes for shapes, known in self._engines.items() if known is engine]:
                self._engines[shapes] = plain
            if self._engine is engine:
                self._engine = plain
        return result

    def _served_on_cpu(self, feed: Mapping[str, Any], serve: Callable[[Engine], T], error: Exception) -> T:
        """Serve a request on the CPU, and use the accelerator no more.

        Raises:
            Exception: ``error``, if the CPU cannot serve it either: the request is at fault, not the accelerator.
        """
        try:
            result = serve(self._config.on_cpu(str(error)))
        except Exception:  # noqa: BLE001 - the error of the engine in use says more
            raise error from None
        with self._lock:
            if self._selector.lose_accelerator(error):
                self._replace_engines(feed)
        return result

    def _replace_engines(self, feed: Mapping[str, Any]) -> None:
        """Drop the engines that use the accelerator; those of other shapes are made again when they come."""
        self._plain = None
        for shapes in [shapes for shapes, engine in self._engines.items() if engine.accelerated]:
            del self._engines[shapes]
        if self._graph is None or not self._graph.declared_free:
            self._engine = self._first_engine()
        else:
            self._engine_for(feed)


def _of_segments(error: Exception, run_options: ort.RunOptions | None) -> bool:
    """Return whether a segment raised an error of its own accord: not asked to terminate, nor for a wrong call."""
    return isinstance(error, RuntimeError) and not (run_options is not None and run_options.terminate)
