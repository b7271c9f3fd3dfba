"""The attention part of a layer, run for every request of a batch, or for every block of its prompt.

The inputs of a request are read in place where its tokens are contiguous: slices of the values of the token-wise parts,
and the filled part of its cache. Outputs are bound only where that saves a copy of the cache. Elsewhere a plain call,
which copies its small outputs, is faster than one that binds all values first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnxruntime as ort

from chrion.generation.iteration import Work
from chrion.generation.rewrites.decoder import MASK, POSITIONS
from chrion.generation.rewrites.observation import Size
from chrion.generation.rewrites.selective import SplitDecoder
from chrion.generation.rewrites.selective_parts import Part

Array = np.ndarray[Any, Any]
#: The most results of a part that are kept, by the number of past tokens.
_MOST_KNOWN = 1024
#: The most bytes of such a result.
_KEPT_BYTES = 1 << 14
#: The fewest new tokens of a request whose attention several threads share. For fewer, one thread takes as long.
_FEWEST_PARALLEL = 64


class Rows:
    """The values of a batch along their token axes, and the rows of each request.

    Args:
        tokens: The values by name; attention outputs are added.
        axes: Their token axes.
        starts: The first token of each request, then the number of tokens.
    """

    def __init__(self, tokens: dict[str, Array], axes: Mapping[str, int], starts: Sequence[int]) -> None:
        self.tokens, self.axes, self.starts = tokens, axes, starts

    def of(self, name: str, at: int) -> Array:
        """Return the rows of a request in a value, as a view."""
        rows = slice(self.starts[at], self.starts[at + 1])
        view: Array = self.tokens[name][(slice(None),) * self.axes[name] + (rows,)]
        return view


class AttentionPart:
    """A part that runs by request.

    Args:
        split: The decoder in parts.
        part: The part.
        session: Its session of one thread; equal parts of several layers share one.
        parallel: Its session of as many threads as there are, for many new tokens; it may be the same.
        options: The options of its runs.
    """

    def __init__(
        self,
        split: SplitDecoder,
        part: Part,
        session: ort.InferenceSession,
        parallel: ort.InferenceSession,
        options: ort.RunOptions,
    ) -> None:
        self._session, self._parallel, self._part = session, parallel, part
        self._options = options
        self._appended, self._merged = split.decoder.appended, split.merged
        self._arguments = session.get_inputs()
        self._names = [argument.name for argument in self._arguments]
        self._results = [result.name for result in session.get_outputs()]
        caches = split.decoder.appended or split.decoder.signature.past
        self._cache = {name: at for at, name in enumerate(caches)}
        self._present = {name: at for at, name in enumerate(split.decoder.signature.present)}
        computed = {name for name in part.outputs if name in split.merged}
        in_place = {name for name in part.outputs if name in self._present}
        self._bound = part.in_place and len(computed | in_place) == len(part.outputs)
        self._computed = sorted(computed)
        #: True if all that the part reads follows from the numbers of new and past tokens.
        self._counted = not computed and all(name in {MASK, POSITIONS, *part.sizes} for name in part.inputs)
        self._known: dict[int, list[Array]] = {}

    def run(self, batch: Sequence[Work], rows: Rows, own: Sequence[dict[str, Array]]) -> None:
        """Run the part for every request.

        Args:
            batch: The requests.
            rows: The values of the batch; the part's attention outputs are added.
            own: The values of each request by name; the part's other outputs are added.
        """
        for name in self._computed:
            kind, sizes = self._merged[name]
            rows.tokens[name] = np.empty([size(rows.starts[-1], 0) for size in sizes], kind)
        for at, work in enumerate(batch):
            if self._counted and len(work.ids) == 1:
                own[at].update(zip(self._part.outputs, self._of_one_token(work, rows, own[at], at), strict=True))
                continue
            inputs = self._inputs(at, work, rows, own[at])
            if self._bound:
                self._run_bound(at, work, inputs, rows)
            else:
                self._run(at, work, inputs, rows, own[at])

    def _inputs(self, at: int, work: Work, rows: Rows, own: Mapping[str, Array]) -> list[Array]:
        """Return the inputs of a request; its new keys and values are appended to its cache."""
        new, total = len(work.ids), work.past + len(work.ids)
        inputs = []
        for name, argument in zip(self._part.inputs, self._arguments, strict=True):
            if name in self._appended:
                array = work.cache.arrays[self._cache[name]]
                source = rows.of(self._appended[name], at)[0]
                array[work.past : total] = source if rows.axes[self._appended[name]] == 1 else source.swapaxes(0, 1)
                inputs.append(array[None, :total])
            elif name in self._cache:
                array = work.cache.arrays[self._cache[name]][None]
                inputs.append(array if self._part.in_place else array[:, :, : work.past])
            elif name in self._part.sizes:
                inputs.append(sized(self._part.sizes[name], argument, new, work.past))
            elif name in rows.tokens:
                inputs.append(rows.of(name, at))
            else:
                inputs.append(own[name])
        return inputs

    def _of_one_token(self, work: Work, rows: Rows, own: Mapping[str, Array], at: int) -> list[Array]:
        """Return the outputs of a part that depends on counts only, for one new token; small ones are kept."""
        known = self._known.get(work.past)
        if known is None:
            feed = dict(zip(self._names, self._inputs(at, work, rows, own), strict=True))
            known = self._session.run(self._results, feed, self._options)
            if len(self._known) < _MOST_KNOWN and sum(value.nbytes for value in known) <= _KEPT_BYTES:
                self._known[work.past] = known
        return known

    def _session_of(self, work: Work) -> ort.InferenceSession:
        return self._parallel if len(work.ids) >= _FEWEST_PARALLEL else self._session

    def _run_bound(self, at: int, work: Work, inputs: Sequence[Array], rows: Rows) -> None:
        """Run with outputs that are bound to their rows, or to the cache that is an input, too."""
        session = self._session_of(work)
        binding = session.io_binding()
        whole = [np.ascontiguousarray(value).reshape(value.shape) for value in inputs]
        for name, value in zip(self._names, whole, strict=True):
            binding.bind_input(name, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
        copied = []
        for name, result in zip(self._part.outputs, self._results, strict=True):
            if name in self._present:
                value = work.cache.arrays[self._present[name]][None]
            else:
                target = rows.of(name, at)
                value = target if target.flags.c_contiguous else np.empty(target.shape, target.dtype)
                copied += [(target, value)] if value is not target else []
            binding.bind_output(result, "cpu", 0, value.dtype, value.shape, value.ctypes.data)
        session.run_with_iobinding(binding, self._options)
        for target, value in copied:
            target[...] = value

    def _run(self, at: int, work: Work, inputs: Sequence[Array], rows: Rows, own: dict[str, Array]) -> None:
        """Run with outputs that onnxruntime allocates, and copy them to their places."""
        feed = dict(zip(self._names, inputs, strict=True))
        total = work.past + len(work.ids)
        outputs = self._session_of(work).run(self._results, feed, self._options)
        for name, value in zip(self._part.outputs, outputs, strict=True):
            if name in self._present:
                array = work.cache.arrays[self._present[name]]
                array[:, work.past : total] = value[0, :, work.past : total]
            elif name in self._merged:
                rows.of(name, at)[...] = value
            else:
                own[name] = value


def sized(sizes: Sequence[Size], argument: Any, new: int, past: int) -> Array:
    """Return an input that depends on the numbers of tokens, as a session declares it."""
    kind = np.int32 if "int32" in argument.type else np.int64
    values = np.array([size(new, past) for size in sizes], kind)
    return values if argument.shape else values.reshape(())
